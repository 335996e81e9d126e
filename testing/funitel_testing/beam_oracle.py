"""What transformers' own beam search finds, for models of which beams end now and then."""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class Found:
    """A completion: its tokens without padding, and its score."""

    ids: tuple[int, ...]
    score: float


class BeamOracle:
    """The model of a folder in float32."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ends = self._model.generation_config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends or [])

    def search(self, prompt: list[int], *, num_beams: int, max_new_tokens: int, **options: Any) -> list[Found]:
        """All beams of a prompt, best first; `options` as `generate` takes them."""
        ids = torch.tensor([prompt])
        with torch.no_grad():
            found = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=num_beams,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=self.ends[0],
                **({"num_return_sequences": num_beams} | options),
            )
        rows = zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True)
        return [Found(self._without_padding(row[len(prompt) :]), score) for row, score in rows]

    def _without_padding(self, ids: list[int]) -> tuple[int, ...]:
        end = next((place + 1 for place, token_id in enumerate(ids) if token_id in self.ends), len(ids))
        return tuple(ids[:end])


def with_ends(source: Path, target: Path, end_token_ids: list[int]) -> Path:
    """Copy a model folder, with other end tokens."""
    shutil.copytree(source, target)
    for name in ("config.json", "generation_config.json"):
        path = target / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | {"eos_token_id": end_token_ids}))
    return target


def some_prompts(count: int, max_id: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of up to 20 tokens, ids below `max_id`."""
    chosen = random.Random(seed)
    return [[chosen.randrange(max_id) for _ in range(chosen.randint(1, 20))] for _ in range(count)]
