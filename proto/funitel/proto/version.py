"""The installed version of funitel."""

from importlib import metadata


def version() -> str:
    """The installed version of funitel."""
    try:
        return metadata.version("funitel")
    except metadata.PackageNotFoundError:
        return "0.0.0"
