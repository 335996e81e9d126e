"""A line of the table once more, with guidellm as the load generator, which neither server's authors wrote."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from funitel.proto.errors import FunitelError

from .builds import Built
from .plan import Cell
from .processes import RunningServer, environment

METRICS = {  # our name -> guidellm's
    "output_tokens_s": "output_tokens_per_second",
    "tpot_ms_p50": "inter_token_latency_ms",
    "ttft_ms_p50": "time_to_first_token_ms",
}


def measure(
    built: Built, server: RunningServer, cell: Cell, tokenizer: Path, folder: Path, seed: int
) -> dict[str, float]:
    """One round of a cell by guidellm.

    Args:
        tokenizer: a folder with the tokenizer of the model, by which it makes its prompts.
        folder: for its report.

    Raises:
        FunitelError: it failed, or a request did.
    """
    work = cell.workload
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [
        *(built.program("guidellm"), "run"),
        *("--backend", f"kind=openai_http,target={server.url},request_format=/v1/completions,stream=true"),
        *("--profile", f"kind=concurrent,streams={work.streams}"),
        *("--constraint", f"kind=max_requests,count={cell.num_requests}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={work.prompt_tokens},output_tokens={work.output_tokens}"),
        *(
            "--seed",
            f"kind=static,value={seed}",
            "--output",
            f"kind=json,path={report.name}",
            "--disable-console-interactive",
        ),
    ]
    variables = {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment(variables, is_ours=False), capture_output=True, text=True, check=False
    )
    if done.returncode or not report.exists():
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise FunitelError(f"guidellm ended with {done.returncode}: {lines[-1][:200] if lines else ''}")
    return figures_of(json.loads(report.read_text()), work.output_tokens)


def figures_of(report: dict[str, Any], output_tokens: int) -> dict[str, float]:
    """The figures of a report.

    Raises:
        FunitelError: a request failed, or had another number of tokens.
    """
    metrics = report["benchmarks"][0]["metrics"]
    if failed := metrics["request_totals"]["errored"]:
        raise FunitelError(f"guidellm: {failed} requests failed")
    tokens = metrics["output_token_count"]["successful"]["mean"]
    if abs(tokens - output_tokens) > 0.5:
        raise FunitelError(f"guidellm: {tokens:.1f} tokens instead of {output_tokens}")
    found = {}
    for name, theirs in METRICS.items():
        values = metrics[theirs]["successful"]
        found[name] = float(values["mean"] if name == "output_tokens_s" else values["median"])
    return found


def summary(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over rounds."""
    return {name: median(each[name] for each in rounds) for name in METRICS}
