"""Greedy tokens of the demo model on this device against its own in float32 on the CPU, with graphs and without."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.executor.executor import Executor
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.hub import resolve
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.proto.errors import FunitelError
from funitel.proto.settings.batch_sizes import BatchSizes
from funitel.proto.step import SamplingParams, SequenceStart, StoppingParams
from gpu_sections import checkpoint, engine
from gpu_sections.figures import Facts, Line
from gpu_sections.plan import BLOCK_SIZE, Plan

NEAR_TIE = 1e-2  # of logits
CPU = torch.device("cpu")
TEXT = Path(__file__).parents[1] / "heldout.txt"

Answers = list[list[int]]  # token ids of each prompt's answer


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """The reference, then every way of computing the same here."""
    folder, model = demo_folder(plan)
    prompts = prompts_of(TextCodec(folder), plan.num_prompts)
    reference = Reference(folder, prompts, plan.num_tokens)
    expected = reference.answers()
    off = BatchSizes("0")
    ways = {"float32": {"dtype": "float32"}, "float32, no graphs": {"dtype": "float32", "cuda_graphs": off}}
    for way, settings in (ways | {"bfloat16": {"dtype": "bfloat16"}}).items():
        executor = engine.load_executor(plan, folder, **settings)
        found = answers_of(plan, executor, prompts)
        gaps = [reference.gap(i, *difference) for i, difference in differences(found, expected)]
        name = f"{model} as on the CPU, {len(prompts)} prompts x {plan.num_tokens} tokens, {way}"
        unit = "% of answers equal; largest gap of logits at a first difference"
        aim = NEAR_TIE if settings["dtype"] == "float32" else None
        key = f"equal_{way.replace(', ', '_').replace(' ', '_')}"
        same = 100 * (1 - len(gaps) / len(prompts))
        yield Line(key, name, same, unit, max(gaps, default=0.0), aim, is_most=True)


def demo_folder(plan: Plan) -> tuple[Path, str]:
    """The demo model and what to call it; a random one where it cannot be had."""
    try:
        if plan.demo:
            return resolve.resolve(plan.demo).folder, "demo model"
    except FunitelError:
        pass  # no network, and not in the cache
    return checkpoint.ensure_small(plan), "random model"


def prompts_of(codec: TextCodec, num_prompts: int) -> list[list[int]]:
    """Prompts of 8 to 40 tokens from different places of the held-out text."""
    ids = codec.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    stride = (len(ids) - 40) // num_prompts
    return [ids[i * stride : i * stride + 8 + i * 32 // num_prompts] for i in range(num_prompts)]


def answers_of(plan: Plan, executor: Executor, prompts: Sequence[Sequence[int]]) -> Answers:
    """What the executor makes of all prompts at once."""
    width = -(-max(len(prompt) + plan.num_tokens for prompt in prompts) // BLOCK_SIZE)
    engine.warm_up(plan, executor, len(prompts) * width * BLOCK_SIZE)
    starts = [
        SequenceStart(
            request_id=i,
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=plan.num_tokens, ignore_eos=True),
            input_ids=tuple(prompt),
            blocks=tuple(range(1 + i * width, 1 + (i + 1) * width)),
        )
        for i, prompt in enumerate(prompts)
    ]
    answers: Answers = [[] for _ in prompts]
    result = executor.compute_prefill(0, starts).describe()
    while True:
        for generation in result.generations:
            answers[generation.request_id] += generation.tokens.ids
        if result.batch is None:
            return answers
        result = executor.compute_decode([result.batch]).describe()


def differences(found: Answers, expected: Answers) -> Iterator[tuple[int, tuple[int, int]]]:
    """Of each answer that differs: which prompt's, the first place where it does, and what was found there."""
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        place = next((k for k, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            yield i, (place, ours[place])


@dataclass
class Reference:
    """The model in float32 on the CPU, in plain torch."""

    folder: Path
    prompts: Sequence[Sequence[int]]
    num_tokens: int

    def __post_init__(self) -> None:
        spec = spec_of(read_json(self.folder / "config.json"))
        weights = Weights(self.folder, torch.float32, CPU, spec.names.prefix, is_shown=False)
        self._decoder = Decoder(spec, weights, TensorParallel(), TorchAttention(BLOCK_SIZE, CPU))
        width = -(-max(len(prompt) + self.num_tokens for prompt in self.prompts) // BLOCK_SIZE)
        heads = HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads)
        self._cache = KVCache(spec, heads, len(self.prompts) * width + 1, BLOCK_SIZE, torch.float32, CPU)
        self._tables = np.arange(1, self._cache.num_blocks, dtype=np.int32).reshape(len(self.prompts), width)
        self._answers: Answers = []

    def answers(self) -> Answers:
        """The likeliest tokens after each prompt."""
        rows = [RowSpan(prompt, 0, table) for prompt, table in zip(self.prompts, self._tables, strict=True)]
        self._answers = [[] for _ in self.prompts]
        for _ in range(self.num_tokens):
            tokens = self._logits(rows).argmax(-1).tolist()
            for answer, token in zip(self._answers, tokens, strict=True):
                answer.append(token)
            rows = [RowSpan([token], row.end, row.block_table) for token, row in zip(tokens, rows, strict=True)]
        return self._answers

    def gap(self, prompt: int, place: int, token: int) -> float:
        """By how much a token's logit is less than the largest at a place of a prompt's answer."""
        known = [*self.prompts[prompt], *self._answers[prompt][:place]]
        logits = self._logits([RowSpan(known, 0, self._tables[prompt])])[0]
        return float(logits.max() - logits[token])

    @torch.inference_mode()
    def _logits(self, rows: Sequence[RowSpan]) -> torch.Tensor:
        logits = self._decoder(ForwardBatch.build(rows, BLOCK_SIZE, CPU), self._cache)
        assert logits is not None
        return logits
