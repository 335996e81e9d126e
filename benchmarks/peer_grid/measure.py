"""One round of one workload on one server over HTTP, with the client's own CPU share and the server's usage; and the
same work in `llama-bench`, which has neither HTTP nor a client."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from funitel.launcher.bench.apis import IGNORE_EOS, USAGE
from funitel.launcher.bench.figures import Figures, Objectives, Timeline, summarise
from funitel.launcher.bench.http import Endpoint
from funitel.launcher.bench.load import Level, run_level
from funitel.launcher.bench.target import PreparedRequest, Target
from funitel.launcher.bench.workload import Workload as Words
from funitel.proto.errors import FunitelError

from .plan import Workload
from .processes import RunningServer, environment
from .recipes import Command

TIMEOUT_SECONDS = 1800.0
WARM_TOKENS = 8
PROMPT_TOLERANCE = 0.02

Round = dict[str, float | list[float] | None]
"""Figures of one round; `ttft_ms` has every request's."""


class NotComparable(FunitelError):
    """A server did not do what was asked: other counts of tokens, or failed requests."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server as a target of load."""

    name: str
    process: RunningServer
    target: Target

    @classmethod
    def of(cls, name: str, process: RunningServer) -> "Server":
        """Find out what a server supports.

        Raises:
            FunitelError: it does not answer a plain request.
        """
        options = frozenset({USAGE, IGNORE_EOS})
        endpoint = Endpoint(process.url, None)
        target = Target(name, "openai-completions", endpoint, model="", options=options, timeout=TIMEOUT_SECONDS)
        uvloop.run(target.probe())
        if not target.ignores_eos or not target.reports_usage:
            raise NotComparable(f"{name} takes no ignore_eos, or reports no usage")
        return cls(name, process, target)

    def warm_up(self, prompts: Sequence[PreparedRequest], streams: int) -> None:
        """Requests that are not measured: some of them, a few tokens each."""
        short = [PreparedRequest(prompt.text, WARM_TOKENS) for prompt in prompts[:streams]]
        uvloop.run(run_level(self.target, Level(concurrency=streams), short, (), lambda timeline: None))

    def measure(self, prompts: Sequence[PreparedRequest], workload: Workload) -> Round:
        """One round.

        Raises:
            NotComparable: a request failed, or the server counts other numbers of tokens than were asked for.
        """
        before = self.process.usage()
        run = uvloop.run(
            run_level(self.target, Level(concurrency=workload.streams), prompts, (), lambda timeline: None)
        )
        after = self.process.usage()
        check(self.name, run.timelines, workload)
        figures = summarise(run.timelines, Objectives())
        return {
            **_kept(figures),
            "ttft_ms": [round(timeline.ttft * 1000, 2) for timeline in run.timelines],
            "client_cpu_share": run.client.cpu_share,
            "client_lag_ms_p99": run.client.lag_ms_p99,
            "server_cpu_seconds": after.cpu_seconds - before.cpu_seconds,
            "resident_mib": after.resident_bytes / 2**20,
            "proportional_mib": after.proportional_bytes / 2**20,
        }


def check(name: str, timelines: Sequence[Timeline], workload: Workload) -> None:
    """See that every request succeeded with the tokens that were asked for, by the server's own count.

    Raises:
        NotComparable: one did not.
    """
    for timeline in timelines:
        if timeline.failure is not None:
            raise NotComparable(f"{name}: {timeline.failure.kind}: {timeline.failure.message}")
        if not timeline.is_counted or timeline.num_tokens != workload.output_tokens:
            counted = timeline.num_tokens if timeline.is_counted else "an unknown number of"
            raise NotComparable(f"{name}: {counted} tokens instead of {workload.output_tokens}")
        prompt = timeline.num_prompt_tokens
        if prompt is None or abs(prompt - workload.prompt_tokens) > PROMPT_TOLERANCE * workload.prompt_tokens:
            raise NotComparable(f"{name}: a prompt of {prompt} tokens instead of {workload.prompt_tokens}")


def _kept(figures: Figures) -> Round:
    names = ("seconds", "output_tokens", "output_tokens_s", "tpot_ms_p50", "ttft_ms_p50", "prompt_tokens_mean")
    return {name: figures[name] for name in names}


def number_of(figures: Round, name: str) -> float:
    """A figure that was measured.

    Raises:
        NotComparable: it was not.
    """
    value = figures.get(name)
    if not isinstance(value, (int, float)):
        raise NotComparable(f"{name} was not measured")
    return float(value)


def prompts_for(counter: Server, workload: Workload, count: int, *key: object) -> list[PreparedRequest]:
    """Prompts of exact lengths, never the same for two keys.

    Args:
        counter: the server with the tokenizer that cuts them.
    """
    words = Words("fixed", workload.prompt_tokens, workload.output_tokens)
    return uvloop.run(counter.target.prepare(words.prompt_specs(count, *key)))


def run_bench(command: Command, workload: Workload) -> Round:
    """One run of `llama-bench`: milliseconds a token, or of the whole prompt.

    Raises:
        NotComparable: it failed.
    """
    done = subprocess.run(
        command.arguments,
        capture_output=True,
        text=True,
        check=False,
        env=environment(command.variables, is_ours=False),
    )
    try:
        rate = float(json.loads(done.stdout)[0]["avg_ts"])
    except (ValueError, LookupError, TypeError) as error:
        lines = done.stderr.strip().splitlines()
        raise NotComparable(f"llama-bench ended with {done.returncode}: {lines[-1][:200] if lines else ''}") from error
    if workload.kind == "prefill":
        return {"ttft_ms_p50": 1000 * workload.prompt_tokens / rate}
    return {"tpot_ms_p50": 1000 / rate, "output_tokens_s": rate}
