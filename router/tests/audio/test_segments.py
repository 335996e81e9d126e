"""Segments and the next window are those of transformers' long-form transcription; subtitles are written of them."""

import random

import pytest
import torch
from transformers import WhisperForConditionalGeneration

from funitel.router.audio.segments import Segment, compression_ratio, part
from funitel.router.audio.subtitles import srt, vtt

FIRST = 100


def by_transformers(ids: list[int], seek: int, num_frames: int) -> tuple[list[tuple[float, float, list[int]]], int]:
    """What transformers makes of the tokens of a window."""
    segments, step = WhisperForConditionalGeneration._retrieve_segment(
        seek_sequence=torch.tensor(ids),
        seek_outputs=[{}],
        time_offset=torch.tensor([seek * 0.01], dtype=torch.float64),
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([num_frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    return [(float(each["start"]), float(each["end"]), each["tokens"].tolist()) for each in segments], int(step)


def transcript(noise: random.Random) -> list[int]:
    """Tokens as the rules of timestamps let them come, cut anywhere."""
    ids, time = [], FIRST + noise.randint(0, 50)
    while len(ids) < 40 and time < FIRST + 1400:
        ids.append(time)
        ids += [noise.randint(0, 90) for _ in range(noise.randint(1, 6))]
        time += noise.randint(1, 200)
        ids.append(time)
        time += noise.choice((0, 0, 20))
    return ids[: noise.randint(1, len(ids))]


def test_windows_are_parted_as_transformers_parts_them() -> None:
    noise = random.Random(4)
    for _ in range(500):
        ids = transcript(noise) if noise.random() < 0.9 else [noise.randint(0, 90) for _ in range(5)]
        seek, num_frames = noise.randint(0, 9000), noise.choice((3000, 3000, 1234, 200))
        expected, step = by_transformers(ids, seek, num_frames)
        found, found_step = part(ids, FIRST, seek, num_frames)
        assert found_step == step
        assert len(found) == len(expected)
        for ours, (start, end, tokens) in zip(found, expected, strict=True):
            assert (ours.start, ours.end) == (pytest.approx(start), pytest.approx(end))
            assert ours.tokens == tokens[: len(ours.tokens)]
            assert len(tokens) - len(ours.tokens) <= 1  # theirs has the time that opens the segment behind
            assert ours.seek == seek


def test_an_empty_window_is_one_segment_without_tokens() -> None:
    assert part([], FIRST, 300, 1000) == ([Segment(3.0, 13.0, [], 300)], 1000)


def test_subtitles() -> None:
    segments = [
        Segment(0.0, 2.5, [], text=" Hello\nthere. "),
        Segment(3599.9996, 3661.04, [], text=" a --> b"),
    ]
    assert srt(segments) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello there.\n\n2\n01:00:00,000 --> 01:01:01,040\na -> b\n\n"
    )
    assert vtt(segments) == (
        "WEBVTT\n\n00:00.000 --> 00:02.500\nHello there.\n\n01:00:00.000 --> 01:01:01.040\na -> b\n\n"
    )
    assert vtt([]) == "WEBVTT\n\n"


def test_texts_that_repeat_themselves_compress_better() -> None:
    assert compression_ratio("") == 0.0
    assert compression_ratio("ha " * 100) > 2.4 > compression_ratio("The quick brown fox jumps over the lazy dog.")
