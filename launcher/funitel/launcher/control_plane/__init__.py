"""The control plane: the models of a server, their replicas and their state, and the API that changes them."""
