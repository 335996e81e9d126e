"""A prompt with blocks evicted to the host is answered as at first, through engine and executor."""

from pathlib import Path

import pytest

from funitel.llm import LLM, SamplingParams
from funitel.model_server.loading import common
from funitel.router.kv_cache.host_tier import HostTier
from funitel_testing.tiny import save_tiny

ASKED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_evicted_blocks_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "host_bytes", lambda settings, device: 1 << 20)  # a CPU stands in for a GPU
    loaded: list[bytes] = []
    load = HostTier.load

    def noted(tier: HostTier, key: bytes, block: int) -> None:
        loaded.append(key)
        load(tier, key, block)

    monkeypatch.setattr(HostTier, "load", noted)
    prompts = [[(7 * i + 3 * j) % 200 for j in range(90)] for i in range(4)]
    with LLM(
        str(save_tiny("llama", tmp_path)),
        device="cpu",
        dtype="float32",
        block_size=4,
        max_batch_total_tokens=140,
        num_threads=1,
    ) as llm:
        answers = [
            [llm.generate([prompt], ASKED, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
            for _ in range(2)
        ]
    assert answers[0] == answers[1]
    assert len(loaded) > 4 * 20
