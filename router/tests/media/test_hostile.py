"""The short form of `make fuzz ARGS=images`, and that it would notice what it looks for."""

import asyncio
import random
from pathlib import Path

import pytest

from funitel.router.sandbox.pool import SandboxPool
from funitel_testing import fuzz_images, fuzz_inputs

COUNT = 300


async def test_damaged_images_are_processed_or_refused_with_a_reason(tmp_path: Path) -> None:
    async with asyncio.timeout(240), fuzz_images.prepare(tmp_path) as tries:
        for number in range(COUNT):
            result = await fuzz_inputs._result(tries["images"], random.Random(f"images 0 {number}"))
            assert result["outcome"] == fuzz_inputs.PASSED, (number, result)


async def test_what_the_mutants_look_for_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(60), fuzz_images.prepare(tmp_path) as tries:

        async def nothing(*_: object) -> tuple[list[int], bytes]:
            raise ZeroDivisionError

        monkeypatch.setattr(SandboxPool, "run_attached", nothing)
        result = await fuzz_inputs._result(tries["images"], random.Random(0))
    assert result["outcome"] == "ZeroDivisionError"


def test_mutants_reach_behind_the_headers() -> None:
    """Many are damaged so little that they are still decoded."""
    from funitel.router.media.decode import decode

    decoded = 0
    for number in range(COUNT):
        try:
            decode(fuzz_images.mutant(random.Random(number)), 1_000_000)
            decoded += 1
        except Exception:
            continue
    assert COUNT // 10 < decoded < COUNT * 9 // 10
