"""Rules beside a grammar: least lengths, allowed tokens, sequences that must not come."""

import numpy as np

from funitel.model_server.sampling.token_rules import TokenRules
from funitel.proto.step import SamplingParams

VOCAB_SIZE = 70  # no multiple of 32
EOS = frozenset({2})


def rules(output_ids: tuple[int, ...] = (), **params: object) -> TokenRules:
    return TokenRules(SamplingParams(**params), None, EOS, VOCAB_SIZE, output_ids)  # type: ignore[arg-type]


def allowed(of: TokenRules) -> set[int]:
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    of.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_b6_nothing_ends_before_the_least_length() -> None:
    state = rules(min_new_tokens=2, stop_token_ids=(65,))
    everything = set(range(VOCAB_SIZE))
    assert allowed(state) == everything - {2, 65}
    state.push(5)
    assert allowed(state) == everything - {2, 65}
    state.push(5)
    assert allowed(state) == everything


def test_b6_only_allowed_tokens_follow() -> None:
    assert allowed(rules(allowed_token_ids=(3, 64, 69))) == {3, 64, 69}


def test_b6_the_last_of_a_banned_sequence_never_follows_the_others() -> None:
    state = rules(banned_tokens=((7, 8, 9), (10,)))
    everything = set(range(VOCAB_SIZE))
    for token_id, banned in ((7, {10}), (8, {10, 9}), (7, {10}), (9, {10})):
        state.push(token_id)
        assert allowed(state) == everything - banned


def test_b6_a_resumed_sequence_knows_what_it_has() -> None:
    state = rules((7, 8), banned_tokens=((7, 8, 9),), min_new_tokens=2)
    assert allowed(state) == set(range(VOCAB_SIZE)) - {9}


def test_b6_rules_that_leave_nothing_give_way() -> None:
    assert allowed(rules(allowed_token_ids=(2,), min_new_tokens=5)) == set(range(VOCAB_SIZE))
