"""The usual cache: what tests fetch, convert and build is kept where the product keeps it."""

import os
from pathlib import Path

from funitel.model_server.hub import resolve


def usual_cache() -> Path:
    """The folder that FUNITEL_CACHE names, or the default one."""
    return resolve.cache_folder(os.environ.get("FUNITEL_CACHE"))


def demo_folder() -> Path:
    """Folder of the demo model."""
    return resolve.resolve("smollm2-135m-instruct", cache_dir=usual_cache()).folder
