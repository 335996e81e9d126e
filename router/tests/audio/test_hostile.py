"""The short form of `make fuzz ARGS=sounds`, and that it would notice what it looks for."""

import asyncio
import random
from pathlib import Path

import pytest

from funitel.proto.errors import InvalidRequest
from funitel.router.audio import service
from funitel.router.audio.decoder import decode
from funitel_testing import fuzz_inputs, fuzz_sounds

COUNT = 400


async def test_damaged_files_are_decoded_or_refused_with_a_reason(tmp_path: Path) -> None:
    async with asyncio.timeout(240), fuzz_sounds.prepare(tmp_path) as tries:
        for number in range(COUNT):
            result = await fuzz_inputs._result(tries["sounds"], random.Random(f"sounds 0 {number}"))
            assert result["outcome"] == fuzz_inputs.PASSED, (number, result)


async def test_what_the_mutants_look_for_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(60), fuzz_sounds.prepare(tmp_path) as tries:

        async def nothing(*_: object) -> tuple[list[int], bytes]:
            raise ZeroDivisionError

        monkeypatch.setattr(service.SandboxPool, "run_attached", nothing)
        result = await fuzz_inputs._result(tries["sounds"], random.Random(0))
    assert result["outcome"] == "ZeroDivisionError"


def test_mutants_reach_behind_the_headers() -> None:
    """Many are damaged so little that they are still decoded."""
    decoded = 0
    for number in range(COUNT // 2):
        try:
            decode(fuzz_sounds.mutant(random.Random(number)), fuzz_sounds.MAX_SOUND_SECONDS, "file")
            decoded += 1
        except InvalidRequest:
            continue
    assert COUNT // 20 < decoded < COUNT // 2 * 9 // 10
