"""A text that a grammar allows, written by a model that draws at random."""

import random

import numpy as np
from llguidance import LLMatcher

from funitel_testing.tiny import byte_tokenizer

EOS_ID = 256
TOKENIZER = byte_tokenizer()


def written(
    grammar: LLMatcher, draw: random.Random, *, max_tokens: int = 400, closing: str = '}"]01:', share: float = 0.6
) -> str | None:
    """Return a text, or None if it does not end within `max_tokens`.

    Args:
        grammar: stays as it is.
        draw: the source of chance.
        max_tokens: of the tokenizer with a token for each byte.
        closing: characters that are preferred, so that texts end.
        share: of the draws in which they are.
    """
    matcher, ids = grammar.deep_copy(), list[int]()
    preferred = {TOKENIZER.token_to_id(character) for character in closing}
    while len(ids) < max_tokens and not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if allowed == [EOS_ID] or (EOS_ID in allowed and draw.random() < 0.5):
            return str(TOKENIZER.decode(ids))
        usual = [token_id for token_id in allowed if token_id in preferred]
        ids.append(draw.choice(usual if usual and draw.random() < share else [i for i in allowed if i != EOS_ID]))
        assert matcher.consume_token(ids[-1])
    return str(TOKENIZER.decode(ids)) if matcher.is_stopped() else None
