"""Rotary positions of three axes: frames, rows and columns of images, as models of the Qwen-VL line have them."""

from collections.abc import Sequence

import numpy as np

from funitel.proto.step import MediaSpan


def axis_positions(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
    """Positions [3, num_tokens] int64 of a prompt, and what to add to the positions of the tokens behind it.

    Text goes on along all axes at once. An item begins where the text before it ends, and the text behind it goes on
    behind its longest side.

    Args:
        num_tokens: of the prompt.
        spans: of the items, in order; each has as many tokens as its grid has places.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    at, following = 0, 0  # token, position
    for span in spans:
        frames, rows, columns = span.grid
        length = span.position - at
        positions[:, at : span.position] = np.arange(following, following + length)
        following += length
        places = np.indices((frames, rows, columns)).reshape(3, -1)
        positions[:, span.position : span.end] = places + following
        following += max(rows, columns)
        at = span.end
    positions[:, at:] = np.arange(following, following + num_tokens - at)
    return positions, following - at
