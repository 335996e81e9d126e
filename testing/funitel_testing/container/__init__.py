"""Build the container image and run it, as root on a machine without a container engine."""
