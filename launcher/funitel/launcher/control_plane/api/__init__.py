"""The API of the control plane over its Unix socket: bodies in our form and in Xinference's, routes, the server."""
