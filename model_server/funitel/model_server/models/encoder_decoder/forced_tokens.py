"""How a checkpoint says that generation begins and ends: tokens that are given or forced, not chosen."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.model_server.files.integrity import read_json
from funitel.model_server.sampling.transcript_rules import TranscriptTokens
from funitel.proto.errors import WeightsError

logger = logging.getLogger(__name__)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "length_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}),
}
"""What checkpoints ask of transformers' own generation, and the values that ask for nothing. A request says it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRules:
    """Token ids: what the decoder begins with, what must come first, and what must come last when length ends it.

    `transcript` are those that may not come, and timestamps.
    """

    start: int
    forced_first: int | None = None
    forced_last: int | None = None
    transcript: TranscriptTokens | None = None  # of a model that hears

    def forced(
        self, num_generated: int, max_new_tokens: int, *, ignores_eos: bool, first: int | None = None
    ) -> int | None:
        """The token that must follow `num_generated` completion tokens, if there is one; the last counts more.

        `first` is what a request wants to come first.
        """
        is_last = num_generated == max_new_tokens - 1
        if is_last and not ignores_eos and self.forced_last is not None:
            return self.forced_last
        if num_generated:
            return None
        return self.forced_first if first is None else first


def read_rules(folder: Path, vocab_size: int, *, hears: bool = False) -> DecodingRules:
    """Read generation_config.json and config.json of a checkpoint; what the first says counts.

    Of a model that `hears` suppressed tokens and timestamps are read too.

    Raises:
        WeightsError: nothing says what the decoder begins with, or a token is none of the vocabulary.
    """
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            found |= {key: value for key, value in read_json(folder / name).items() if value is not None}
    start = _token(found, "decoder_start_token_id", vocab_size)
    if start is None:
        start = _token(found, "bos_token_id", vocab_size)
    if start is None:
        raise WeightsError(f"{folder} does not say what the decoder begins with (decoder_start_token_id)")
    used = ("suppress_tokens", "begin_suppress_tokens") if hears else ()
    ignored = [
        f"{key}={found[key]}"
        for key, neutral in _NEUTRAL.items()
        if key in found and key not in used and found[key] not in neutral
    ]
    if ignored:
        logger.info("requests say how tokens are chosen; the checkpoint's %s is not used", ", ".join(ignored))
    return DecodingRules(
        start=start,
        forced_first=_token(found, "forced_bos_token_id", vocab_size),
        forced_last=_token(found, "forced_eos_token_id", vocab_size),
        transcript=_transcript(found, vocab_size) if hears else None,
    )


def _transcript(found: Mapping[str, Any], vocab_size: int) -> TranscriptTokens:
    end = _token(found, "eos_token_id", vocab_size)
    if end is None:
        raise WeightsError("the checkpoint does not say what ends a transcript (eos_token_id)")
    return TranscriptTokens(
        end=end,
        suppressed=_tokens(found, "suppress_tokens", vocab_size),
        suppressed_first=_tokens(found, "begin_suppress_tokens", vocab_size),
        no_timestamps=_token(found, "no_timestamps_token_id", vocab_size - 1),
        max_initial=_token(found, "max_initial_timestamp_index", vocab_size),
    )


def _tokens(found: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids; none where the key is missing."""
    values = found.get(key) or []
    if not isinstance(values, list) or not all(type(each) is int and 0 <= each < vocab_size for each in values):
        raise WeightsError(f"{key} must be a list of token ids within 0..{vocab_size - 1}, given {values!r:.100}")
    return tuple(values)


def _token(found: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    """A token id; of a list the first."""
    value = found.get(key)
    if isinstance(value, list) and value:
        value = value[0]
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab_size:
        raise WeightsError(f"{key} must be within 0..{vocab_size - 1}, given {value!r}")
    return value
