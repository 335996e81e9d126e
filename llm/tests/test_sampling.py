"""Sampling parameters: what is refused and in which words, what the engine is told."""

import math
from typing import Any

import pytest

from funitel.llm import InvalidRequest, SamplingParams
from funitel.llm.sampling import params_for
from funitel.proto.strategy import DecodingStrategy


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 0}, "n must be an integer >= 1, given 0"),
        ({"n": True}, "n must be an integer >= 1, given True"),
        ({"n": 1.5}, "n must be an integer >= 1, given 1.5"),
        ({"temperature": -0.1}, "temperature must be a number >= 0, given -0.1"),
        ({"temperature": math.nan}, "temperature must be a number >= 0, given nan"),
        ({"temperature": "hot"}, "temperature must be a number >= 0, given 'hot'"),
        ({"top_p": 0}, "top_p must be a number > 0 and <= 1, given 0"),
        ({"top_p": 1.01}, "top_p must be a number > 0 and <= 1, given 1.01"),
        ({"top_k": -2}, "top_k must be an integer >= -1, given -2"),
        ({"min_p": 1.5}, "min_p must be a number >= 0 and <= 1, given 1.5"),
        ({"typical_p": 0.0}, "typical_p must be a number > 0 and <= 1, given 0.0"),
        ({"seed": -1}, "seed must be an integer within 0..18446744073709551615, given -1"),
        ({"seed": 2**64}, "seed must be an integer within 0..18446744073709551615, given 18446744073709551616"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, given 0"),
        ({"presence_penalty": 2.1}, "presence_penalty must be a number >= -2 and <= 2, given 2.1"),
        ({"frequency_penalty": -3}, "frequency_penalty must be a number >= -2 and <= 2, given -3"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number > 0, given 0"),
        ({"logprobs": -1}, "logprobs must be an integer >= 0, given -1"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, given 1"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output must be True or False, given 'no'"),
        ({"stop": [""]}, "stop must be a text or a list of texts, none of them empty, given ['']"),
        ({"stop": ""}, "stop must be a text or a list of texts, none of them empty, given ''"),
        ({"stop": [3]}, "stop must be a text or a list of texts, none of them empty, given [3]"),
        ({"stop": 3}, "stop must be a text or a list of texts, none of them empty, given 3"),
        ({"grammar": "[a-z]+"}, "grammar must be a Grammar, given '[a-z]+'"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping from token ids to numbers, given [1]"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias: a token id must be an integer >= 0, given 'a'"),
        ({"tfs_z": 1.5}, "tfs_z must be a number >= 0 and <= 1, given 1.5"),
        ({"max_k": 1.5}, "max_k must be an integer within 0..2147483647, given 1.5"),
        ({"mirostat": 3}, "mirostat must be an integer within 0..2, given 3"),
        ({"mirostat": 2, "top_k": 9}, "mirostat and top_k exclude each other, given 2 and 9"),
        ({"fsd_alpha": 0.5, "tfs_z": 0.5}, "fsd_alpha and tfs_z exclude each other, given 0.5 and 0.5"),
        (
            {"dry_sequence_breakers": [""]},
            "dry_sequence_breakers must be at most 64 texts of 1 to 40 characters, given ['']",
        ),
        ({"logit_bias": {7: 101}}, "logit_bias[7] must be a number >= -100 and <= 100, given 101"),
    ],
)
def test_what_is_out_of_range_is_refused_in_one_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**wrong)
    assert caught.value.message == message


def test_greedy_says_nothing_about_drawing() -> None:
    (params,) = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1, typical_p=0.2, seed=5).for_engine()
    assert not params.is_sampled
    assert params.seed == 5


def test_strategies_have_the_names_and_values_of_the_server() -> None:
    neutral = DecodingStrategy()
    assert all(getattr(SamplingParams(), name) == getattr(neutral, name) for name in DecodingStrategy.__slots__)
    assert SamplingParams(top_n_sigma=-1).for_engine()[0].strategy is None
    given = {"mirostat": 2, "mirostat_tau": 4.0, "dry_multiplier": 0.5, "dry_sequence_breakers": ["."]}
    (params,) = SamplingParams(**given).for_engine()
    assert params.strategy == DecodingStrategy(**given | {"dry_sequence_breakers": (".",)})
    (greedy,) = SamplingParams(**given, temperature=0).for_engine()
    assert greedy.strategy is not None
    assert (greedy.is_sampled, greedy.strategy.used) == (False, ("dry_multiplier",))


def test_a_temperature_of_one_is_sampled() -> None:
    (params,) = SamplingParams(temperature=1).for_engine()
    assert params.is_sampled
    assert params.do_sample


def test_the_ith_completion_has_the_ith_seed_and_the_last_is_followed_by_the_first() -> None:
    assert [params.seed for params in SamplingParams(n=3, seed=2**64 - 2).for_engine()] == [2**64 - 2, 2**64 - 1, 0]
    seeds = {SamplingParams().for_engine()[0].seed for _ in range(10)}
    assert len(seeds) == 10


def test_penalties_have_openais_meaning() -> None:
    (params,) = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.1).for_engine()
    assert (params.presence_penalty, params.count_penalty, params.frequency_penalty) == (0.5, 0.25, 0.0)
    assert params.repetition_penalty == 1.1


def test_minus_one_means_all_tokens() -> None:
    assert SamplingParams(top_k=-1).for_engine()[0].top_k == 0


def test_one_for_all_or_one_for_each() -> None:
    one, other = SamplingParams(seed=1), SamplingParams(seed=2)
    assert params_for(one, 3) == [one] * 3
    assert params_for([one, other], 2) == [one, other]
    assert params_for((params for params in (one, other)), 2) == [one, other]
    with pytest.raises(InvalidRequest, match="one for each of the 3 prompts, given 2"):
        params_for([one, other], 3)
    for wrong in ({"n": 1}, "greedy", 3, [one, None]):
        with pytest.raises(InvalidRequest, match="sampling_params must be SamplingParams or a list of them, given"):
            params_for(wrong, 2)  # type: ignore[arg-type]
