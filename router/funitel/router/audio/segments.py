"""The segments of a transcript: what its timestamps part it into, and where the next window begins."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

RATE = 16_000  # samples in a second that a model hears
HOP = 160  # of these in a frame of a spectrogram
WINDOW = 400  # samples of a spectrum
FRAME, FLOOR = 320, 1e-3  # of a spectrogram of magnitudes: samples of a frame, and what is added before the logarithm
WINDOW_SECONDS = 30
FRAMES_PER_SECOND = RATE // HOP
SECONDS_PER_TIMESTAMP = 0.02
FRAMES_PER_TIMESTAMP = 2


@dataclass(slots=True)
class Segment:
    """A part of a transcript; `start` and `end` are seconds from the beginning of the sound."""

    start: float
    end: float
    tokens: list[int]  # with timestamps
    seek: int = 0  # frame at which its window begins
    temperature: float = 0.0
    mean_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech: float | None = None
    text: str = field(default="")


def part(ids: Sequence[int], first_timestamp: int, seek: int, num_frames: int) -> tuple[list[Segment], int]:
    """Part the tokens of a window, without the one that ends it, into segments.

    Two timestamps in a row are the end of a segment and the beginning of the next. Behind the last such pair there may
    be a segment that the end of the window cuts: it is left out, and the next window begins at the pair.

    Args:
        ids: the tokens.
        first_timestamp: the token of 0 s.
        seek: frame at which the window begins.
        num_frames: that the window has, at most those of 30 s.

    Returns the segments, and how many frames on the next window begins.
    """
    offset = seek / FRAMES_PER_SECOND
    is_time = [token_id >= first_timestamp for token_id in ids]
    pairs = [place + 1 for place in range(len(ids) - 1) if is_time[place] and is_time[place + 1]]
    ends_once = is_time[-2:] == [False, True]  # no speech comes behind
    if not pairs:
        latest = next((token_id for token_id in reversed(ids) if token_id > first_timestamp), None)
        last = num_frames // FRAMES_PER_TIMESTAMP if latest is None else latest - first_timestamp
        return [Segment(offset, offset + last * SECONDS_PER_TIMESTAMP, list(ids), seek)], num_frames
    if ends_once:
        pairs.append(len(ids))
    segments, begin = [], 0
    for end in pairs:
        first, last = ids[begin] - first_timestamp, ids[end - 1] - first_timestamp
        start = offset + first * SECONDS_PER_TIMESTAMP
        segments.append(Segment(start, offset + last * SECONDS_PER_TIMESTAMP, list(ids[begin:end]), seek))
        begin = end
    if ends_once:
        return segments, num_frames
    return segments, (ids[begin - 1] - first_timestamp) * FRAMES_PER_TIMESTAMP


def compression_ratio(text: str) -> float:
    """How many times smaller a text is when it is compressed: large for one that repeats itself."""
    content = text.encode()
    return len(content) / len(zlib.compress(content)) if content else 0.0
