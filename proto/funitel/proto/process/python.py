"""The command line that runs a module of ours in another Python process."""

import sys


def module_command(name: str) -> tuple[str, ...]:
    """Make the command that runs a module; it imports nothing from the working folder, which may be a model's."""
    return (sys.executable, "-P", "-m", name)
