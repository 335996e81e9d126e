"""Write greedy completions by transformers, as the reference for a server's tokens.

float32, one prompt at a time and no padding, so that nothing but the model decides. Beside each generated id
stands the gap between the two best logits: a server that differs where it is 1e-3 lost a near tie to
rounding, where it is 1.0 it is wrong. The tokenizer is read from tokenizer.json itself, so no
beginning-of-text token appears that the file does not ask for. The last line on stdout is one JSON object.

    python benchmarks/oracle.py MODEL_FOLDER --max-new-tokens 64 --out oracle.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from funitel_testing.cache import as_floats

DEFAULT_PROMPTS = Path(__file__).resolve().parent.parent / "integration-tests" / "data" / "prompts.json"


def load_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_model(folder: Path, device: str) -> Any:
    """Load in float32, and drop whatever its generation_config says except where a completion ends."""
    model: Any = AutoModelForCausalLM.from_pretrained(as_floats(folder), dtype=torch.float32, local_files_only=True)
    ends = model.generation_config.eos_token_id
    pad = ends[0] if isinstance(ends, list) else ends
    plain: Any = GenerationConfig
    model.generation_config = plain(do_sample=False, num_beams=1, eos_token_id=ends, pad_token_id=pad)
    return model.to(device).eval()


def load_prompts(path: Path) -> list[dict[str, Any]]:
    """Read a list of strings, or of objects with `prompt`, and optionally `name` and `add_special_tokens`."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    return [{"name": str(index), "add_special_tokens": True} | row for index, row in enumerate(rows)]


def complete(model: Any, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    """Return the greedy completion of one prompt, with logprobs and the two best choices at each position."""
    input_ids = torch.tensor([prompt_ids], device=model.device)  # [1, num_prompt_tokens]
    with torch.inference_mode():
        out = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ids = out.sequences[0, len(prompt_ids) :]  # [num_generated]
    logits = torch.cat(out.logits).float()  # [num_generated, vocab_size]
    best = logits.topk(2, dim=-1)
    if not torch.equal(logits.argmax(dim=-1), ids):
        raise RuntimeError("generate() did not take the best token at every position")
    logprobs = logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
    return {
        "completion_ids": ids.tolist(),
        "logprobs": logprobs.tolist(),
        "gaps": (best.values[:, 0] - best.values[:, 1]).tolist(),
        "runner_up_ids": best.indices[:, 1].tolist(),
    }


def finish_reason(ids: Sequence[int], max_new_tokens: int) -> str:
    """Name the end as TGI does: at the limit it is `length`, even where the last token is an end token."""
    return "length" if len(ids) == max_new_tokens else "eos_token"


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    tokenizer, model = load_tokenizer(args.model), load_model(args.model, args.device)
    completions = []
    for row in load_prompts(args.prompts):
        started = time.perf_counter()
        prompt_ids = tokenizer.encode(row["prompt"], add_special_tokens=row["add_special_tokens"]).ids
        answer = complete(model, prompt_ids, args.max_new_tokens)
        ids = answer["completion_ids"]
        answer["text"] = tokenizer.decode(ids, skip_special_tokens=True)
        answer["finish_reason"] = finish_reason(ids, args.max_new_tokens)
        answer["smallest_gap"] = min(answer["gaps"])
        completions.append(row | {"prompt_ids": prompt_ids} | answer)
        seconds = time.perf_counter() - started
        print(f"{row['name']}: {len(prompt_ids)} + {len(ids)} tokens, {seconds:.1f} s", file=sys.stderr)
    eos = model.generation_config.eos_token_id
    facts = {"model": args.model.name, "dtype": "float32", "max_new_tokens": args.max_new_tokens}
    return facts | {"eos_token_id": eos, "torch": torch.__version__, "completions": completions}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Greedy completions by transformers in float32.")
    parser.add_argument("model", type=Path, help="folder in Hugging Face layout, with tokenizer.json")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, help="JSON list of prompts")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    report = json.dumps(run(args), ensure_ascii=False)
    if args.out is not None:
        args.out.write_text(report + "\n", encoding="utf-8")
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
