"""Drafters on two ranks: texts are those of one rank, and a draft model that is the target is always right."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.draft_worker import serve_drafting
from funitel_testing.eagle3 import Eagle3Oracle
from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.mtp import MtpOracle
from funitel_testing.ranks import run_ranks
from funitel_testing.servers import free_port
from funitel_testing.tiny import byte_tokenizer, save_tiny
from funitel_testing.zoo import ZOO

PROMPTS = [(1, list(range(40, 60))), (2, list(range(100, 170)))]


def checkpoint(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A target, and the settings of its drafter."""
    if kind in ("qwen3_5", "deepseek_v3"):
        ZOO[kind].save(folder)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        MtpOracle(folder)
        return folder, {}
    target = save_tiny("llama", folder / "target", num_hidden_layers=8)
    if kind == "eagle3":
        Eagle3Oracle(folder / "head", target)
        return target, {"draft_model": str(folder / "head")}
    if kind == "whole":
        one = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 16}
        return target, {"draft_model": str(save_tiny("llama", folder / "draft", **one))}
    return target, {"draft_model": str(target)}


@pytest.mark.parametrize("kind", ["itself", "whole", "qwen3_5", "deepseek_v3", "eagle3"])
def test_two_ranks_give_the_texts_of_one(tmp_path: Path, kind: str) -> None:
    folder, settings = checkpoint(kind, tmp_path / "model")
    job = {"folder": str(folder), "size": 2, "port": free_port(), "prompts": PROMPTS}
    (tmp_path / "job.json").write_text(json.dumps(job | {"settings": {"speculate": 3} | settings}))
    run_ranks(serve_drafting, tmp_path, 2)
    answers = [json.loads((tmp_path / f"answers-{rank}.json").read_text()) for rank in range(2)]
    plain = load_executor(folder)
    for i, prompt in PROMPTS:
        (first, drafted, accepted), (second, *counts) = answers[0][str(i)], answers[1][str(i)]
        assert first + second == ids_of(run_alone(plain, start(i, prompt, 16)))
        assert counts == [drafted, accepted]
        assert drafted
        if kind == "itself":
            assert drafted == accepted
