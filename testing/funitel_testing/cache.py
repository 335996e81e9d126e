"""The usual cache: what tests fetch, convert and build is kept where the product keeps it."""

import os
from contextlib import suppress
from pathlib import Path

from funitel.model_server.cpu.build import build
from funitel.model_server.cpu.compiler import CannotBuild
from funitel.model_server.files.atomic_folder import exclusive
from funitel.model_server.files.gguf_pointer import POINTER
from funitel.model_server.hub import resolve
from funitel.model_server.settings import QuantizeSettings


def usual_cache() -> Path:
    """The folder that FUNITEL_CACHE names, or the default one."""
    return resolve.cache_folder(os.environ.get("FUNITEL_CACHE"))


def share_engines(cache: Path) -> None:
    """Have another cache use the built CPU engines of the usual one: building one takes a minute and more."""
    usual = usual_cache()
    with suppress(CannotBuild):
        build(usual)
    (cache / "cpu").symlink_to(usual / "cpu")


def demo_folder() -> Path:
    """Folder of the demo model."""
    return resolve.resolve("smollm2-135m-instruct", cache_dir=usual_cache()).folder


def as_floats(folder: Path) -> Path:
    """A folder that transformers can read: of one that points to a GGUF a copy in float32, kept in the cache."""
    if not (folder / POINTER).is_file():
        return folder
    from funitel.model_server.tools.quantize.command import quantize  # torch: seconds, not wanted by every test

    target = usual_cache() / f"{folder.name}-float32"
    with exclusive(target):
        if not target.is_dir():
            quantize(QuantizeSettings(model_id="", output_dir=str(target), method="none"), folder)
    return target
