"""Measure the disk tier of the prefix cache: distinct prefixes, a restart of the whole server, the same prefixes again.

The first server computes every prompt, the second finds what the file of the first has. The pool has room for a few of
them, so hits are read from the file. A third server without a file computes some prompts, which shows what writing
costs. One request at a time; the time to first token is that of a client of this machine. Greedy texts of both passes
are compared. Flags after `--` are handed on.

    python benchmarks/disk_tier.py smollm2-135m-instruct --prefixes 1000 --words 270

The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from funitel.launcher.config.sockets import free_port

PROGRAM = (sys.executable, "-m", "funitel")
READY_SECONDS = 300.0
STOP_SECONDS = 60.0
MAX_TOKENS = 4  # of an answer
WORDS = "river lake stone tree cloud road house light water field night train paper green small over under with".split()


def prompt_of(number: int, num_words: int) -> str:
    """A prompt that begins as no other one does."""
    chance = random.Random(number)
    return f"{number}: " + " ".join(chance.choices(WORDS, k=num_words))


@contextmanager
def server(model: str, folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """Run a server until the end of the block; gives its address.

    Raises:
        SystemExit: it ends or is not ready in time; in one line.
    """
    port = free_port()
    with (folder / "server.log").open("ab") as log:
        command = [*PROGRAM, "--model-id", model, "--port", str(port), *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + READY_SECONDS
    try:
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                last = (folder / "server.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise SystemExit(f"the server is not ready: {last[0] if last else 'it said nothing'}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(url: str, prompt: str) -> tuple[float, str, dict[str, Any]]:
    """Seconds to the first token, the greedy text, and what usage says of the prompt."""
    body = {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin, first, text, usage = time.perf_counter(), 0.0, "", {}
    with urllib.request.urlopen(request, timeout=READY_SECONDS) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - begin
            event = json.loads(line[6:])
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
    return first, text, usage


def run_pass(url: str, prompts: Sequence[str]) -> tuple[list[float], list[str], list[dict[str, Any]]]:
    """Ask each prompt once, behind one that warms the server up."""
    ask(url, "Hello")
    answers = [ask(url, prompt) for prompt in prompts]
    return [each[0] for each in answers], [each[1] for each in answers], [each[2] for each in answers]


def measure(
    model: str, num_prefixes: int, num_words: int, num_plain: int, gb: float, pool_tokens: int, flags: Sequence[str]
) -> dict[str, Any]:
    """The figures, times in milliseconds."""
    prompts = [prompt_of(number, num_words) for number in range(num_prefixes)]
    folder = Path(tempfile.mkdtemp(prefix="funitel-disk-tier-"))
    try:
        pool = ("--max-batch-total-tokens", str(pool_tokens), *flags)
        tier = (*pool, "--kv-disk-gb", str(gb), "--kv-disk-dir", str(folder / "kv"))
        with server(model, folder, pool) as url:
            plain, _, _ = run_pass(url, prompts[:num_plain])
        with server(model, folder, tier) as url:
            computed, expected, _ = run_pass(url, prompts)
        file_bytes = sum(path.stat().st_blocks * 512 for path in (folder / "kv").iterdir())
        with server(model, folder, tier) as url:
            found, texts, usages = run_pass(url, prompts)
    finally:
        shutil.rmtree(folder)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    asked = [usage["prompt_tokens"] for usage in usages]
    hits = [seconds for seconds, count in zip(found, cached, strict=True) if count]
    return {
        "prefixes": num_prefixes,
        "prompt_tokens_median": median(asked),
        "pool_tokens": pool_tokens,
        "file_bytes": file_bytes,
        "prompts_found": len(hits) / num_prefixes,
        "tokens_found": round(sum(cached) / sum(asked), 4),
        "tokens_found_on_disk": sum(
            usage["prompt_tokens_details"]["cached_tokens_by_tier"]["disk"] for usage in usages
        ),
        "texts_that_differ": sum(a != b for a, b in zip(expected, texts, strict=True)),
        "ttft_ms_without_tier": _ms(plain),
        "ttft_ms_computed": _ms(computed),
        "ttft_ms_found": _ms(hits),
        "ratio": round(median(hits) / median(computed), 4) if hits else None,
    }


def _ms(seconds: Sequence[float]) -> dict[str, float] | None:
    if len(seconds) < 2:
        return None
    return {"median": round(1e3 * median(seconds), 1), "p95": round(1e3 * quantiles(seconds, n=20)[-1], 1)}


def main() -> None:
    """Parse arguments, print one line for people and one for programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct", help="as --model-id")
    parser.add_argument("--prefixes", type=int, default=1000, help="distinct prompts")
    parser.add_argument("--words", type=int, default=270, help="of a prompt; each is a token or little more")
    parser.add_argument("--plain", type=int, default=50, help="prompts that a server without a file computes")
    parser.add_argument("--pool-tokens", type=int, default=4096, help="as --max-batch-total-tokens")
    parser.add_argument("--gb", type=float, default=16.0, help="of the file, as --kv-disk-gb")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    figures = measure(args.model, args.prefixes, args.words, args.plain, args.gb, args.pool_tokens, flags)
    print(
        f"{figures['prefixes']} prompts: {figures['prompts_found']:.1%} found after a restart, "
        f"first token computed {figures['ttft_ms_computed']}, found {figures['ttft_ms_found']}"
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
