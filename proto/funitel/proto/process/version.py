"""The installed version of funitel."""

from functools import cache
from typing import TYPE_CHECKING

from funitel.proto.process.deferred_module import deferred

if TYPE_CHECKING:
    from importlib import metadata
else:
    metadata = deferred("importlib.metadata")  # it imports email's modules: 20 to 30 ms


@cache
def version() -> str:
    """The installed version of funitel."""
    try:
        return metadata.version("funitel")
    except metadata.PackageNotFoundError:
        return "0.0.0"
