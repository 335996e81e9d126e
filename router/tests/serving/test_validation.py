"""TGI's rules, one by one, at their borders, and in their order."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from funitel.proto.errors import ContextTooLong, InvalidRequest
from funitel.proto.strategy import DecodingStrategy
from funitel.router.api.native.schema import GenerateParameters
from funitel.router.core.request import Limits
from funitel.router.serving.sampling_request import BrokenRule, SamplingRequest
from funitel.router.serving.validation import (
    build_request,
    check_parameters,
    check_token_ids,
    completion_limit,
    truncated,
)
from funitel.router.settings import RouterSettings

LIMITS = Limits(max_input_tokens=1000, max_total_tokens=3000, pool_tokens=10_000)
SETTINGS = RouterSettings(max_best_of=2, max_stop_sequences=4, max_top_n_tokens=5)


def check(inputs: str = "Hi", stream: bool = False, settings: RouterSettings = SETTINGS, **given: object) -> None:
    parameters = GenerateParameters.model_validate(given)
    with named():
        check_parameters(parameters.sampling, inputs, LIMITS, settings, stream=stream)


@contextmanager
def named(**names: str) -> Iterator[None]:
    """Raise as `prepare` does for an API with such names of fields."""
    try:
        yield
    except BrokenRule as broken:
        raise broken.error(names) from None


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"best_of": 0}, "best_of", "`best_of` must be > 0 and <= 2. Given: 0"),
        ({"best_of": 3, "do_sample": True}, "best_of", "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": 2}, "best_of", "you must use sampling when `best_of` is > 1. Given: 2"),
        (
            {"best_of": 2, "top_k": 5, "seed": 7},
            "seed",
            "`seed` must not be set when `best_of` > 1. Given: 7",
        ),
        ({"temperature": 0.0}, "temperature", "`temperature` must be strictly positive. Given: 0.0"),
        ({"temperature": -1}, "temperature", "`temperature` must be strictly positive. Given: -1.0"),
        ({"temperature": 1e-45}, "temperature", "`temperature` must be strictly positive. Given: 0.0"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty",
            "`repetition_penalty` must be strictly positive. Given: 0.0",
        ),
        (
            {"frequency_penalty": 2.1},
            "frequency_penalty",
            "`frequency_penalty` must be >= -2.0 and <= 2.0. Given: 2.1",
        ),
        ({"top_p": 1.0}, "top_p", "`top_p` must be > 0.0 and < 1.0. Given: 1.0"),
        ({"top_p": 0.0}, "top_p", "`top_p` must be > 0.0 and < 1.0. Given: 0.0"),
        ({"typical_p": 1.0}, "typical_p", "`typical_p` must be > 0.0 and < 1.0. Given: 1.0"),
        ({"top_k": 0}, "top_k", "`top_k` must be strictly positive. Given: 0"),
        ({"top_k": -5}, "top_k", "`top_k` must be strictly positive. Given: -5"),
        ({"max_new_tokens": 0}, "max_new_tokens", "`max_new_tokens` must be strictly positive. Given: 0"),
        ({"stop": list("abcde")}, "stop", "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"stop": ["a", ""]}, "stop", "`stop` sequences cannot be empty"),
        ({"top_n_tokens": 6}, "top_n_tokens", "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ({"inputs": ""}, "inputs", "`inputs` cannot be empty"),
        ({"truncate": 0}, "truncate", "`truncate` must be strictly positive and less than 1000. Given: 0"),
        (
            {"truncate": 1001},
            "truncate",
            "`truncate` must be strictly positive and less than 1000. Given: 1001",
        ),
        ({"adapter_id": "mine"}, "adapter_id", "`adapter_id` is not supported: no adapter is loaded. Given: mine"),
        ({"min_p": 1.5}, "min_p", "`min_p` must be >= 0.0 and <= 1.0. Given: 1.5"),
        ({"min_p": -0.1}, "min_p", "`min_p` must be >= 0.0 and <= 1.0. Given: -0.1"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "`logit_bias` must be >= -100.0 and <= 100.0. Given: 101.0"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "`logit_bias` must have token ids as its names. Given: 'a'"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "`logit_bias` must have token ids as its names. Given: '05'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "`logit_bias` must have token ids as its names. Given: '-1'"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "`logit_bias` must have token ids as its names. Given: '٣'"),
        (
            {"stream": True, "best_of": 2, "do_sample": True},
            "best_of",
            "`best_of` != 1 is not supported when streaming tokens. Given: 2",
        ),
        (
            {"stream": True, "decoder_input_details": True},
            "decoder_input_details",
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_value(given: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**given)  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.message) == (param, message)
    assert caught.value.public_message == "Input validation error: " + message


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"best_of": 1, "seed": 1},
        {"best_of": 2, "temperature": 1.0},
        {"temperature": 0.01, "top_p": 0.999, "typical_p": 0.001, "top_k": 1},
        {"frequency_penalty": -2, "repetition_penalty": 0.1},
        {"stop": list("abcd")},
        {"stop": "a"},
        {"top_n_tokens": 5},
        {"truncate": 1000},
        {"stream": True, "best_of": 1},
    ],
)
def test_what_is_allowed(given: dict[str, object]) -> None:
    check(**given)  # type: ignore[arg-type]


def test_best_of_can_be_off() -> None:
    with pytest.raises(InvalidRequest, match="not allowed for this endpoint"):
        check(best_of=2, do_sample=True, settings=RouterSettings(max_best_of=1))


def test_rules_are_checked_in_order() -> None:
    """Each request breaks one rule and all that come after it."""
    broken: dict[str, object] = {
        "best_of": 3,
        "temperature": 0.0,
        "repetition_penalty": 0.0,
        "frequency_penalty": 3.0,
        "top_p": 0.0,
        "typical_p": 0.0,
        "top_k": 0,
        "max_new_tokens": 0,
        "stop": list("abcde"),
        "top_n_tokens": 6,
        "inputs": "",
        "truncate": 0,
    }
    order = []
    expected = list(broken)
    while broken:
        with pytest.raises(InvalidRequest) as caught:
            check(**broken)  # type: ignore[arg-type]
        assert caught.value.param is not None
        order.append(caught.value.param)
        del broken[caught.value.param]
    assert order == expected


@pytest.mark.parametrize(
    ("num_input", "wanted", "limit"),
    [
        (10, 5, 5),
        (10, None, 2990),
        (1000, None, 2000),
        (1000, 2000, 2000),
        (1000, 2001, 2000),  # the first 1024 fit, so TGI accepts it; the completion ends with the context
        (1000, 2**32 - 1, 2000),
    ],
)
def test_completion_limit(num_input: int, wanted: int | None, limit: int) -> None:
    assert completion_limit(num_input, wanted, LIMITS) == limit


@pytest.mark.parametrize(
    ("num_input", "wanted", "message"),
    [
        (1001, 10, "`inputs` must have less than 1000 tokens. Given: 1001"),
        (1001, None, "`inputs` must have less than 1000 tokens. Given: 1001"),
        (
            1977,
            5000,
            "`inputs` tokens + `max_new_tokens` must be <= 3000. Given: 1977 `inputs` tokens and 5000 `max_new_tokens`",
        ),
        (
            2995,
            6,
            "`inputs` tokens + `max_new_tokens` must be <= 3000. Given: 2995 `inputs` tokens and 6 `max_new_tokens`",
        ),
        (
            3001,
            None,
            "`inputs` tokens + `max_new_tokens` must be <= 3000. Given: 3001 `inputs` tokens and 0 `max_new_tokens`",
        ),
    ],
)
def test_lengths_that_do_not_fit(num_input: int, wanted: int | None, message: str) -> None:
    with pytest.raises(ContextTooLong) as caught, named():
        completion_limit(num_input, wanted, LIMITS)
    assert caught.value.message == message


def test_truncation_keeps_the_end() -> None:
    assert truncated([1, 2, 3], None) == (1, 2, 3)
    assert truncated([1, 2, 3], 2) == (2, 3)
    assert truncated([1, 2, 3], 9) == (1, 2, 3)


def test_parameters_left_out_are_neutral() -> None:
    request = build_request(SamplingRequest(), "Hi", [1, 2], LIMITS)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.typical_p) == (1.0, 0, 1.0, 1.0)
    assert not sampling.is_sampled
    assert not sampling.has_penalties
    assert request.stopping.max_new_tokens == 2998
    assert request.input_ids == (1, 2)


def test_a_seed_is_kept_or_drawn() -> None:
    seeds = {build_request(SamplingRequest(), "Hi", [1], LIMITS).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert build_request(SamplingRequest(seed=0), "Hi", [1], LIMITS).sampling.seed == 0


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"), named():
        build_request(SamplingRequest(), "Hi", [], LIMITS)


def test_a_bias_is_for_a_token_that_exists() -> None:
    check_token_ids(SamplingRequest(logit_bias={"9": 1.0}), 10)
    with (
        pytest.raises(InvalidRequest, match="`logit_bias` must have token ids >= 0 and < 10 as its names. Given: 10"),
        named(),
    ):
        check_token_ids(SamplingRequest(logit_bias={"10": 1.0}), 10)


@pytest.mark.parametrize("name", ["ignore_eos", "ignore_eos_token"])
def test_both_words_ignore_the_end(name: str) -> None:
    given = GenerateParameters.model_validate({name: True})
    assert build_request(given.sampling, "Hi", [1], LIMITS).stopping.ignore_eos is True
    assert build_request(SamplingRequest(), "Hi", [1], LIMITS).stopping.ignore_eos is False


def test_parameters_beyond_tgis_reach_the_shards() -> None:
    given = GenerateParameters(min_p=0.1, logit_bias={"7": -100.0, "0": 2.5}, watermark=True)
    sampling = build_request(replace(given.sampling, raw_logprobs=True), "Hi", [1], LIMITS).sampling
    assert sampling.min_p == 0.1
    assert sampling.logit_bias == ((7, -100.0), (0, 2.5))
    assert sampling.watermark is True
    assert sampling.raw_logprobs is True


@pytest.mark.parametrize("wanted", [1, 1024, 1025, 1500, 2990])
def test_a_long_answer_is_as_long_as_asked(wanted: int) -> None:
    """TGI goes on in slices of 1024 tokens and returns up to the next multiple (contract 5.4)."""
    asked = build_request(SamplingRequest(max_new_tokens=wanted), "Hi", [1] * 10, LIMITS)
    assert asked.stopping.max_new_tokens == wanted


def test_an_api_names_fields_in_its_own_words() -> None:
    with pytest.raises(ContextTooLong) as caught, named(inputs="messages", max_new_tokens="max_tokens"):
        completion_limit(2995, 6, LIMITS)
    assert caught.value.param == "max_tokens"
    assert caught.value.message == (
        "`messages` tokens + `max_tokens` must be <= 3000. Given: 2995 `messages` tokens and 6 `max_tokens`"
    )


def test_what_a_client_sent_is_quoted_as_it_is() -> None:
    with pytest.raises(InvalidRequest, match=r"Given: \$inputs `inputs`$"), named(inputs="messages"):
        check_parameters(SamplingRequest(adapter_id="$inputs `inputs`"), "Hi", LIMITS, SETTINGS, stream=False)


def test_speculation_is_the_servers_unless_a_request_says_less() -> None:
    limits = replace(LIMITS, max_speculate=4)
    asked = {None: 4, 0: 0, 3: 3}
    for given, expected in asked.items():
        assert build_request(SamplingRequest(speculate=given), "Hi", [1], limits).speculate == expected
    assert build_request(SamplingRequest(), "Hi", [1], LIMITS).speculate == 0
    mirostat = SamplingRequest(do_sample=True, strategy=DecodingStrategy(mirostat=2))
    assert build_request(mirostat, "Hi", [1], limits).speculate == 0
