"""Chunked recurrences against their definition, token by token, in float64."""

import pytest
import torch

from funitel.model_server.layers.states.linear_attention import (
    CHUNK,
    SPAN,
    attend,
    attend_by_delta,
    attend_once,
    attend_once_by_delta,
)

GROUPS, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5, 7


class Drawn:
    """Random inputs of tokens; decays are mild, or so strong that their products over a chunk are no numbers."""

    def __init__(self, num_tokens: int, decay: float, *, by_row: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.q = draw(num_tokens, GROUPS, KEY_DIM)
        self.k = torch.nn.functional.normalize(draw(num_tokens, GROUPS, KEY_DIM), dim=-1)
        self.v = draw(num_tokens, GROUPS, HEADS, VALUE_DIM)
        self.log_decay = -draw(num_tokens, GROUPS, HEADS, *([KEY_DIM] if by_row else [])).abs() * decay
        self.beta = draw(num_tokens, GROUPS, HEADS).sigmoid() * 2
        self.state = draw(GROUPS, HEADS, KEY_DIM, VALUE_DIM)


def defined(drawn: Drawn, *, by_delta: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens read and the state behind them, head by head."""
    num_tokens = len(drawn.q)
    read = torch.empty(num_tokens, GROUPS, HEADS, VALUE_DIM, dtype=torch.float64)
    left = drawn.state.double().clone()
    for t in range(num_tokens):
        for g in range(GROUPS):
            q, k = drawn.q[t, g].double(), drawn.k[t, g].double()
            for h in range(HEADS):
                state = left[g, h] * drawn.log_decay[t, g, h].double().exp()[..., None]
                written = drawn.v[t, g, h].double()
                if by_delta:
                    written = drawn.beta[t, g, h].double() * (written - k @ state)
                left[g, h] = state + torch.outer(k, written)
                read[t, g, h] = q @ left[g, h]
    return read, left


@pytest.mark.parametrize("decay", [0.1, 30.0])
@pytest.mark.parametrize("num_tokens", [1, 2, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3, SPAN + 1])
@pytest.mark.parametrize("by_delta", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_chunks_give_what_is_defined(by_row: bool, by_delta: bool, num_tokens: int, decay: float) -> None:
    drawn = Drawn(num_tokens, decay, by_row=by_row)
    if by_delta:
        found = attend_by_delta(drawn.q, drawn.k, drawn.v, drawn.log_decay, drawn.beta, drawn.state)
    else:
        found = attend(drawn.q, drawn.k, drawn.v, drawn.log_decay, drawn.state)
    for ours, expected in zip(found, defined(drawn, by_delta=by_delta), strict=True):
        assert float((ours - expected).abs().max()) < 2e-5


@pytest.mark.parametrize("by_delta", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_one_token_of_each_of_several_gives_what_is_defined(by_row: bool, by_delta: bool) -> None:
    drawn, expected = Drawn(1, 0.1, by_row=by_row), []
    rows = [Drawn(1, 0.1, by_row=by_row) for _ in range(3)]
    for i, row in enumerate(rows):
        row.state, row.v = drawn.state * (i + 1), drawn.v - i
        expected.append(defined(row, by_delta=by_delta))
    q, k, v, log_decay, beta = (torch.cat([getattr(row, name) for row in rows]) for name in _PARTS)
    states = torch.stack([row.state for row in rows])
    read, left = attend_once(q, k, v, log_decay, states)
    if by_delta:
        read, left = attend_once_by_delta(q, k, v, log_decay, beta, states)
    for i, (theirs, behind) in enumerate(expected):
        assert float((read[i] - theirs[0]).abs().max()) < 1e-5
        assert float((left[i] - behind).abs().max()) < 1e-5


_PARTS = ("q", "k", "v", "log_decay", "beta")
