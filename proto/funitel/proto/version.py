"""The installed version of funitel."""

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The installed version of funitel."""
    try:
        return metadata.version("funitel")
    except metadata.PackageNotFoundError:
        return "0.0.0"
