"""Rows of the sequence table to sample, with parameters drawn at random."""

from typing import Any, cast

import numpy as np

from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.sampler import SamplingState
from funitel.model_server.sequence.detokenizer import Detokenizer, StopMatcher
from funitel.model_server.sequence.table import SequenceState
from funitel.proto.step import GrammarType, SamplingParams, SequenceStart, StoppingParams
from funitel.proto.strategy import DecodingStrategy

STRATEGIES: dict[str, dict[str, Any]] = {
    "top-n-sigma": {"top_n_sigma": 1.0},
    "max-k": {"max_k": 3},
    "tail-free": {"tfs_z": 0.9},
    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 2.0},
    "dry": {"dry_multiplier": 3.0, "dry_allowed_length": 1},
    "fsd": {"fsd_alpha": 0.5},
    "randomized fsd": {"fsd_alpha": 0.5, "fsd_random_tokens": 10},
    "several": {"top_n_sigma": 2.0, "max_k": 20, "tfs_z": 0.95, "xtc_probability": 0.5, "dry_multiplier": 1.0},
}
"""Decoding strategies of a row, each once."""

_CHOICES: tuple[dict[str, tuple[Any, ...]], ...] = (
    {},
    {"temperature": (0.3, 0.9, 1.7)},
    {"do_sample": (True,)},
    {"top_k": (1, 5, 40, 10**6)},
    {"top_p": (0.1, 0.7, 0.95)},
    {"min_p": (0.05, 1.0)},
    {"typical_p": (0.4, 0.9)},
    {"repetition_penalty": (0.7, 1.3)},
    {"frequency_penalty": (-0.5, 0.7)},
    {"presence_penalty": (0.5,), "count_penalty": (0.0, 0.25)},
    {"logit_bias": (((4, -100.0), (9, 5.0)), ((0, 1.5),))},
    {"raw_logprobs": (True,)},
    {"grammar": ("a regex",)},
    {"strategy": tuple(DecodingStrategy(**each) for each in STRATEGIES.values())},
)


def draw_params(generator: np.random.Generator) -> dict[str, Any]:
    """Some parameters together."""
    found: dict[str, Any] = {"seed": int(generator.integers(0, 2**63))}
    for i in generator.choice(len(_CHOICES), size=generator.integers(0, 4), replace=False):
        found |= {name: values[generator.integers(len(values))] for name, values in _CHOICES[i].items()}
    if "grammar" in found:
        found["grammar_type"] = GrammarType.REGEX
    return found


def make_row(
    index: int, params: dict[str, Any], generator: np.random.Generator, vocab_size: int, top_n: int | None = None
) -> SequenceState:
    """A row with some tokens of prompt and completion; no text is made of them."""
    prompt, output = (tuple(generator.integers(0, vocab_size, generator.integers(1, 9)).tolist()) for _ in range(2))
    sampling = SamplingParams(**params)
    top_n = int(generator.choice([0, 0, 3, 8])) if top_n is None else top_n
    return SequenceState(
        index=index,
        start=SequenceStart(request_id=index, sampling=sampling, stopping=StoppingParams(max_new_tokens=100)),
        tokens=[*prompt, *output],
        prompt_len=len(prompt),
        num_cached=len(prompt) + len(output) - 1,
        sampling=SamplingState.over(sampling, top_n, prompt, output),
        detokenizer=cast(Detokenizer, None),
        stops=StopMatcher(()),
    )


def make_masks(rows: list[int], vocab_size: int, generator: np.random.Generator) -> TokenMasks | None:
    """What grammars of some rows of a batch may allow."""
    if not rows:
        return None
    bits = generator.integers(-(2**31), 2**31, (len(rows), -(-vocab_size // 32))).astype(np.int32)
    bits[:, 0] |= 1
    return TokenMasks(rows, bits)
