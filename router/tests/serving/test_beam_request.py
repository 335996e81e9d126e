"""What a beam search may not be asked for with, and what can never fit."""

from typing import Any

import pytest

from funitel.proto.errors import InvalidRequest
from funitel.proto.strategy import DecodingStrategy
from funitel.router.core.request import Limits
from funitel.router.serving.beam_request import check_beams, needed_blocks, with_beams, without_sampling
from funitel.router.serving.sampling_request import BeamRequest, BrokenRule, SamplingRequest
from funitel.router.serving.validation import build_request
from funitel.router.settings import RouterSettings

LIMITS = Limits(
    max_input_tokens=100,
    max_total_tokens=200,
    pool_tokens=400,
    block_size=4,
    max_beams=6,
    eos_token_ids=frozenset({2}),
)
SETTINGS = RouterSettings(max_best_of=4)


class Codec:
    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))

    def special_text(self, token_id: int) -> str | None:
        return None


def sampling(width: int = 2, length_penalty: float = 1.0, **fields: Any) -> SamplingRequest:
    beams = BeamRequest(width=width, num_returned=1, width_field="n", length_penalty=length_penalty)
    return SamplingRequest(beams=beams, **fields)


def check(asked: SamplingRequest, limits: Limits = LIMITS, *, stream: bool = False) -> None:
    assert asked.beams is not None
    check_beams(asked, asked.beams, limits, SETTINGS, stream=stream)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (sampling(temperature=0.5), "`use_beam_search` and `temperature` exclude each other. Given: 0.5"),
        (sampling(do_sample=True), "`use_beam_search` and `do_sample` exclude each other. Given: True"),
        (sampling(top_k=3), "`use_beam_search` and `top_k` exclude each other. Given: 3"),
        (sampling(min_p=0.1), "`use_beam_search` and `min_p` exclude each other. Given: 0.1"),
        (sampling(repetition_penalty=1.2), "`use_beam_search` and `repetition_penalty` exclude each other. Given: 1.2"),
        (sampling(watermark=True), "`use_beam_search` and `watermark` exclude each other. Given: True"),
        (sampling(bad_words=("a",)), "`use_beam_search` and `bad_words` exclude each other. Given: ('a',)"),
        (
            sampling(strategy=DecodingStrategy(tfs_z=0.5)),
            "`use_beam_search` and `tfs_z` exclude each other. Given: 0.5",
        ),
        (sampling(5), "`n` must be > 0 and <= 4 with `use_beam_search`. Given: 5"),
        (sampling(0), "`n` must be > 0 and <= 4 with `use_beam_search`. Given: 0"),
        (sampling(length_penalty=-101), "`length_penalty` must be >= -100 and <= 100. Given: -101"),
    ],
)
def test_contradictions_are_refused_by_name(asked: SamplingRequest, says: str) -> None:
    with pytest.raises(BrokenRule) as raised:
        check(asked)
    error = raised.value.error({})
    assert isinstance(error, InvalidRequest)
    assert error.message == says
    assert f"`{error.param}`" in says


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"temperature": 1.0, "top_p": 1.0, "seed": 3}])
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    asked = sampling(**fields)
    check(asked)
    plain = without_sampling(asked)
    assert (plain.do_sample, plain.temperature, plain.top_p, plain.seed) == (False, None, None, None)


def test_streams_and_shards_that_cannot_fork_are_refused() -> None:
    with pytest.raises(BrokenRule) as raised:
        check(sampling(), stream=True)
    assert raised.value.error({}).message.startswith("`use_beam_search` is not available when `stream` is true")
    without = Limits(max_input_tokens=100, max_total_tokens=200, pool_tokens=400)
    with pytest.raises(BrokenRule) as raised:
        check(sampling(), without)
    assert raised.value.error({}).message.startswith("`use_beam_search` is not supported by the shards of this server")


def test_beams_that_never_fit_are_refused() -> None:
    asked = sampling(4, max_new_tokens=100)
    assert asked.beams is not None
    request = build_request(without_sampling(asked), "x", tuple(range(10)), LIMITS)
    with pytest.raises(BrokenRule) as raised:
        with_beams(request, asked.beams, LIMITS, Codec())
    says = "`n` beams of 10 prompt tokens and 100 `max_tokens` need 424 tokens of the KV pool, which has 400. Given: 4"
    assert raised.value.error({"max_new_tokens": "max_tokens"}).message == says


def test_rows_tell_the_models_own_log_probabilities_and_nothing_ends_them() -> None:
    asked = sampling(2, max_new_tokens=5, stop=("b",), stop_token_ids=(7,), min_new_tokens=2)
    assert asked.beams is not None
    request = with_beams(build_request(asked, "x", (1, 2), LIMITS), asked.beams, LIMITS, Codec())
    assert request.sampling.raw_logprobs
    assert not request.sampling.is_masked
    assert request.beams is not None
    assert request.beams.end_token_ids == {2, 7}
    assert (request.beams.num_kept, request.beams.num_candidates) == (6, 8)
    assert (request.beams.stop_sequences, request.beams.min_new_tokens) == (("b",), 2)


@pytest.mark.parametrize(
    ("num_prompt", "max_new_tokens", "width", "needed"),
    [(8, 1, 4, 6), (8, 9, 4, 10), (9, 8, 4, 10), (9, 9, 4, 14), (3, 2, 1, 2)],
)
def test_needed_blocks(num_prompt: int, max_new_tokens: int, width: int, needed: int) -> None:
    assert needed_blocks(num_prompt, max_new_tokens, width, 4) == needed
