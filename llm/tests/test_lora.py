"""Adapters of an offline model: each call has the tokens of the merged model, in this process and in others."""

import asyncio
from pathlib import Path

import pytest

from funitel.llm import LLM, AsyncLLM, BeamSearchParams, InvalidRequest, LoRARequest, SamplingParams
from funitel_testing.tiny_adapters import TinyAdapter, merge, save_adapter

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["one two three", "Adapters"]
MADE = TinyAdapter(rank=4, targets=("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(model, folder / str(seed), MADE, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def expected(
    model: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[list[tuple[int, ...]]]:
    """The tokens of the merged models, and last those of the base."""
    folder = tmp_path_factory.mktemp("merged")
    found = []
    for number, adapter in enumerate(adapters):
        with LLM(merge(model, adapter, MADE, folder / str(number)), num_threads=1, dtype="float32") as llm:
            found.append(tokens_of(llm, None))
    with LLM(model, num_threads=1, dtype="float32") as llm:
        return [*found, tokens_of(llm, None)]


def tokens_of(llm: LLM, asked: LoRARequest | None) -> list[tuple[int, ...]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS, lora_request=asked, use_tqdm=False)]


@pytest.mark.parametrize("num_shard", [1, 2])
def test_calls_with_adapters_have_the_tokens_of_merged_models(
    num_shard: int, model: Path, adapters: list[Path], expected: list[list[tuple[int, ...]]]
) -> None:
    assert len({tuple(each) for each in expected}) == len(expected), "the adapters change nothing"
    asked = [LoRARequest(f"adapter {i}", i + 1, str(folder)) for i, folder in enumerate(adapters)]
    with LLM(model, num_threads=1, dtype="float32", num_shard=num_shard, enable_lora=True, max_loras=2) as llm:
        for _ in range(2):
            assert [tokens_of(llm, each) for each in (*asked, None)] == expected


def test_beams_and_requests_with_adapters(
    model: Path, adapters: list[Path], expected: list[list[tuple[int, ...]]]
) -> None:
    asked = LoRARequest("first", 1, str(adapters[0]))
    with LLM(model, num_threads=1, dtype="float32", enable_lora=True) as llm:
        (found,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=1, max_tokens=12), lora_request=asked)
        assert tuple(found.sequences[0].tokens[-12:]) == expected[0][0]

        async def completed() -> tuple[int, ...]:
            async for output in AsyncLLM(llm).generate(PROMPTS[1], PARAMS, lora_request=asked):
                last = output
            return last.outputs[0].token_ids

        assert asyncio.run(completed()) == expected[0][1]


def test_adapters_that_cannot_be_used(model: Path, adapters: list[Path], llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"lora_request needs LLM\(\.\.\., enable_lora=True\)"):
        tokens_of(llm, LoRARequest("a", 1, str(adapters[0])))
    for name, number in (("", 1), ("a", 0)):
        with pytest.raises(InvalidRequest, match="lora_name must be|lora_int_id must be"):
            LoRARequest(name, number, "x")
    with LLM(model, num_threads=1, dtype="float32", enable_lora=True, max_lora_rank=2) as small:
        with pytest.raises(InvalidRequest, match="lora_path must be a folder"):
            tokens_of(small, LoRARequest("a", 1, str(tmp_path / "none")))
        with pytest.raises(InvalidRequest, match="rank"):
            tokens_of(small, LoRARequest("a", 1, str(adapters[0])))
        assert tokens_of(small, None)
