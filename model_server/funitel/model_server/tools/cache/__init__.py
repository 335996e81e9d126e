"""The models on this disk: what was downloaded or converted is listed, and deleted where no process uses it."""
