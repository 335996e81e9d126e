"""The chunk policy against simulated machines: running streams keep flowing, prompts always advance."""

import pytest

from funitel.router.chunking import (
    FIRST_CHUNK_TOKENS,
    GAP_FACTOR,
    IDLE_STEP_SECONDS,
    MIN_CHUNK_TOKENS,
    StepTimeModel,
)


def test_before_anything_is_measured_the_first_chunk_is_modest() -> None:
    assert StepTimeModel().chunk_budget(4096, has_running=False) == FIRST_CHUNK_TOKENS
    assert StepTimeModel().chunk_budget(10, has_running=False) == 10


@pytest.mark.parametrize(("decode", "per_token"), [(0.045, 0.0015), (0.005, 0.0008), (0.02, 0.00002)])
def test_mixed_steps_stay_within_the_gap(decode: float, per_token: float) -> None:
    model = StepTimeModel()
    for _ in range(20):
        model.observe(0, decode, has_running=True)
    longest = 0.0
    for _ in range(50):
        chunk = model.chunk_budget(4096, has_running=True)
        seconds = decode + per_token * chunk
        longest = max(longest, seconds)
        model.observe(chunk, seconds, has_running=True)
    assert longest <= max(GAP_FACTOR * decode * 1.1, decode + per_token * MIN_CHUNK_TOKENS)
    assert decode + per_token * model.chunk_budget(4096, has_running=True) > 0.8 * min(
        GAP_FACTOR * decode, decode + per_token * 4096
    )


def test_growing_contexts_shrink_the_chunk() -> None:
    model, decode = StepTimeModel(), 0.045
    for _ in range(20):
        model.observe(0, decode, has_running=True)
    context, longest = 0, 0.0
    while context < 4000:
        chunk = model.chunk_budget(4096, has_running=True)
        seconds = decode + chunk * (0.0014 + 0.0000008 * context)
        longest = max(longest, seconds)
        model.observe(chunk, seconds, has_running=True)
        context += chunk
    assert longest < 1.25 * GAP_FACTOR * decode


def test_alone_a_prompt_takes_big_chunks_but_bounded_steps() -> None:
    model = StepTimeModel()
    for _ in range(10):
        chunk = model.chunk_budget(4096, has_running=False)
        model.observe(chunk, 0.03 + chunk * 0.001, has_running=False)
    assert 0.03 + model.chunk_budget(4096, has_running=False) * 0.001 == pytest.approx(IDLE_STEP_SECONDS, rel=0.1)


def test_a_slow_machine_still_advances() -> None:
    model = StepTimeModel()
    model.observe(0, 0.01, has_running=True)
    model.observe(100, 30.0, has_running=True)
    assert model.chunk_budget(4096, has_running=True) == MIN_CHUNK_TOKENS


def test_what_prompts_cost_alone_does_not_size_the_first_chunk_beside_a_stream() -> None:
    model = StepTimeModel()
    for _ in range(5):
        model.observe(400, 0.5, has_running=False)
        model.observe(0, 0.05, has_running=True)
    assert model.chunk_budget(4096, has_running=True) == MIN_CHUNK_TOKENS


def test_chunks_grow_from_below_where_small_ones_cost_more_by_token() -> None:
    model, decode, chunks = StepTimeModel(), 0.05, []
    for _ in range(20):
        model.observe(0, decode, has_running=True)
    for _ in range(60):
        chunk = model.chunk_budget(4096, has_running=True)
        seconds = decode + 0.03 + 0.0012 * chunk  # a step with any prompt token pays the same again
        assert seconds < GAP_FACTOR * decode * 1.1
        chunks.append(chunk)
        model.observe(chunk, seconds, has_running=True)
    assert chunks[0] == MIN_CHUNK_TOKENS
    assert chunks[-1] == pytest.approx(((GAP_FACTOR - 1) * decode - 0.03) / 0.0012, rel=0.1)
