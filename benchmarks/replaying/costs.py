"""How long a step takes on a simulated shard: a few coefficients, measured by `calibration`."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step: `base`, and so much for each thing in it."""

    base: float
    prompt_token: float
    decode_row: float
    context_token: float  # a token that a decoding row attends to
    prompt_pair: float  # a token that a prompt token attends to

    def seconds(self, prompt_tokens: float, prompt_pairs: float, decode_rows: float, context_tokens: float) -> float:
        """Predict one step."""
        return (
            self.base
            + self.prompt_token * prompt_tokens
            + self.prompt_pair * prompt_pairs
            + self.decode_row * decode_rows
            + self.context_token * context_tokens
        )

    def divided(self, num_shards: int, efficiency: float) -> "StepCosts":
        """Of `num_shards` ranks, where each doubling of their number keeps `efficiency` of the ideal speed."""
        speed = num_shards * efficiency ** math.log2(num_shards)
        return StepCosts(
            base=self.base / speed,
            prompt_token=self.prompt_token / speed,
            decode_row=self.decode_row / speed,
            context_token=self.context_token / speed,
            prompt_pair=self.prompt_pair / speed,
        )


# SmolLM2-135M-Instruct, int8 weights, one shard with two threads on two cores of a virtual machine with AVX-512, shared
# with other work: least of six steps a shape, 2026-11, the median step 20 % off this fit.
# `python benchmarks/replay.py --calibrate --quantize int8 --steps 6`
DEMO_COSTS = StepCosts(base=0.0100, prompt_token=4.6e-4, decode_row=2.0e-3, context_token=2.8e-6, prompt_pair=7.7e-7)
