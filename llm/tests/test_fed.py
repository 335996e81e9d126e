"""The offline API over steps that are launched ahead, as on a GPU: the tokens of steps that wait for one another."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from funitel.llm import LLM, Grammar, SamplingParams, loaded
from funitel.model_server.executor.async_sampling import AsyncSampling
from funitel.model_server.executor.executor import Executor
from funitel.model_server.gpu_sampling.ops import TorchMaths
from funitel.model_server.loading import decoder
from funitel.proto.step import ShardInfo

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 1, "temperature": 1.5, "top_k": 30},
    {"seed": 2, "n": 3, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0, "stop": ["a", "e", "i"], "ignore_eos": True},
    {"seed": 3, "top_p": 0.9, "logprobs": 2},
    {"seed": 4, "mirostat": 2, "mirostat_tau": 3.0},
    {"seed": 5, "fsd_alpha": 0.5, "fsd_random_tokens": 6, "dry_multiplier": 1.0, "no_repeat_ngram_size": 3},
    {"temperature": 0, "grammar": Grammar.regex("(yes|no), (certainly|never) [0-9]{3}")},
)


def generated(model: Path) -> list[Any]:
    """Completions of many prompts at once, each asked for in another way, in a pool that holds only some of them."""
    prompts = [f"{'long ' * i}prompt" for i in range(3 * len(WAYS))]
    params = [SamplingParams(max_tokens=5 + 3 * i, **WAYS[i % len(WAYS)]) for i in range(len(prompts))]
    with LLM(model, num_threads=1, block_size=4, max_batch_total_tokens=600, max_total_tokens=160) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[(each.token_ids, each.text, each.finish_reason) for each in output.outputs] for output in outputs]


def test_steps_launched_ahead_give_the_same_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "load_fused", lambda *_: None)  # torch computes: rounding does not hang on company
    expected = generated(model)
    load, made = loaded.load_generator, []

    def load_fed(*arguments: Any) -> tuple[Executor, ShardInfo]:
        executor, info = load(*arguments)
        runner = executor.runner
        parts = executor.spec, runner.decoder, runner.pools, executor.codec, executor.parallel, executor.options
        made.append(Executor(*parts, partial(AsyncSampling, maths=TorchMaths())))
        return made[-1], info

    monkeypatch.setattr(loaded, "load_generator", load_fed)
    assert generated(model) == expected
    assert len(made) == 1
