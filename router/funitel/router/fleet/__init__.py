"""The models of one router: what the control plane says of them, the services that serve them, loads on demand."""
