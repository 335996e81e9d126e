"""A cache that is damaged between two starts: the second start makes it again, and the answers stay what they were."""

import os
import shutil
from pathlib import Path

import pytest

from funitel.model_server.cpu.build import LIBRARY, build
from funitel.model_server.cpu.compiler import CannotBuild
from funitel_testing.cache import usual_cache
from funitel_testing.clients import client_of, generate
from funitel_testing.servers import Server, serving


def _overwrite(path: Path) -> None:
    """Put 0xff in the middle; the size stays."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 4))


@pytest.fixture
def cache(tmp_path: Path, demo_model: Path) -> Path:
    """A cache of its own with the demo model, as fetched and converted, and with a built CPU engine."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for path in demo_model.parent.glob("SmolLM2*.gguf"):
        os.link(path, folder / path.name) if path.stat().st_dev == folder.stat().st_dev else shutil.copy(path, folder)
    shutil.copytree(demo_model, folder / demo_model.name)
    try:
        library = build(usual_cache())
    except CannotBuild as reason:
        pytest.skip(str(reason))
    shutil.copytree(library.parent, folder / "cpu" / library.parent.name)
    return folder


async def _answer(server: Server) -> list[int]:
    async with client_of(server.url) as client:
        return (await generate(client, "The sea is", max_new_tokens=12)).ids


async def test_a6_a_damaged_cache_is_made_again(cache: Path, demo_model: Path, tmp_path: Path, is_full: bool) -> None:
    """The library too with --full: a minute of the compiler, and the unit tests damage another one in every way."""
    (library,) = (cache / "cpu").glob(f"*/{LIBRARY}")
    folder = cache / demo_model.name
    environ = {"FUNITEL_CACHE": str(cache)}
    flags = ("--max-batch-total-tokens", "4096")
    with serving(tmp_path, *flags, environ=environ) as server:
        expected = await _answer(server)
        assert "made again" not in server.tail(10**6)
    if is_full:
        os.truncate(library, 20_000)  # its code is mapped beyond that: SIGBUS if it were loaded
    _overwrite(next(folder.glob("SmolLM2*.gguf")))
    (folder / "tokenizer.json").write_bytes(b"")
    with serving(tmp_path, *flags, environ=environ) as server:
        assert await _answer(server) == expected
        log = server.tail(10**6)
    assert (f"{library.parent} is damaged; the fused CPU step is built again" in log) == is_full
    assert "tokenizer.json has 0 bytes" in log or ".gguf" in log  # the first that differs is named
    assert "the folder is made again" in log
    assert (folder / "tokenizer.json").stat().st_size > 10**6
