"""When a window's transcript fails or is silence, and the pieces in which text streams."""

from dataclasses import replace

import pytest

from funitel.router.api.audio.transcribe import NO_THRESHOLDS, TextPieces, Thresholds, WindowText

GOOD = WindowText(ids=[1], temperature=0.0, mean_logprob=-0.5, compression_ratio=1.5, no_speech=0.1, is_aborted=False)


@pytest.mark.parametrize(
    ("changes", "fails", "is_silence"),
    [
        ({}, False, False),
        ({"compression_ratio": 2.5}, True, False),
        ({"mean_logprob": -1.1}, True, False),
        ({"mean_logprob": -1.1, "no_speech": 0.7}, False, True),
        ({"no_speech": 0.7}, False, False),
        ({"compression_ratio": 3.0, "no_speech": None}, True, False),
    ],
)
def test_thresholds(changes: dict[str, float], *, fails: bool, is_silence: bool) -> None:
    found = replace(GOOD, **changes)
    assert (Thresholds().fails(found), Thresholds().is_silence(found)) == (fails, is_silence)
    assert (NO_THRESHOLDS.fails(found), NO_THRESHOLDS.is_silence(found)) == (False, False)


@pytest.mark.parametrize(
    "pieces",
    [[" ", "", "Hello", " ", "", "wor", "ld.  ", "\n"], ["Hello world. "], [" Hello ", " ", "", "there"], [" "]],
)
def test_streamed_text_is_the_whole_text_without_white_space_around_it(pieces: list[str]) -> None:
    sent: list[str] = []
    text = TextPieces(sent.append)
    for piece in pieces:
        text.add(piece)
    assert "".join(sent) == text.text == "".join(pieces).strip()
    assert all(sent)
