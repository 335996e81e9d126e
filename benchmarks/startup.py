"""Measure a start, from the command to the first token of an answer, with the model in the cache.

Each start is a new `funitel` on a free port, which is asked for one token as soon as it says that it is ready, and
then ended. Phases end where a line of its log arrives; what several processes do at once is not told apart. The time of
processors is that of all processes of the deployment. Medians of several starts count, of phases that all of them log;
the first start, which may find neither files in memory nor the fused step compiled, is not measured. Flags after `--`
are handed on.

    python benchmarks/startup.py smollm2-135m-instruct --starts 5 -- --quantize int8

The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from statistics import median

from funitel.launcher.config.sockets import free_port

PHASES = {
    "model is present": "settings: ",
    "imports": "loading weights: 0%",
    "weights": "loaded model=",
    "pool": "KV pool ",
    "ready": "ready: ",
}
"""What ends a phase, in the log; the phase before began where the last one ended."""
FIRST_TOKEN = "first token"
PROGRAM = (sys.executable, "-m", "funitel")
MAX_SECONDS = 300.0  # of a start, the first token included
STOP_SECONDS = 30.0


def start(model: str, flags: Sequence[str]) -> dict[str, float]:
    """Start a server, ask for a token, end it. Seconds of each phase, of all of them, and of processors.

    Raises:
        SystemExit: the server ends, does not answer, or takes longer than `MAX_SECONDS`; in one line.
    """
    port = free_port()
    command = [*PROGRAM, "--model-id", model, "--port", str(port), *flags]
    before = _processor_seconds()
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    timer = threading.Timer(MAX_SECONDS, _kill, [process])
    timer.start()
    try:
        seconds, ready = _phases(process, begin)
        _first_token(port)
        end = time.perf_counter()
        seconds |= {FIRST_TOKEN: end - ready, "total": end - begin}
    finally:
        timer.cancel()
        _end(process)
    return seconds | {"processors": _processor_seconds() - before}


def _phases(process: subprocess.Popen[str], begin: float) -> tuple[dict[str, float], float]:
    """Seconds of the phases up to the one that ends when the server is ready, and that instant."""
    assert process.stdout is not None
    seconds: dict[str, float] = {}
    pending, last, line = dict(PHASES), begin, "it said nothing"
    for line in process.stdout:
        now = time.perf_counter()
        found = next((phase for phase, words in pending.items() if words in line), None)
        if found is not None:
            seconds[found], last = now - last, now
            del pending[found]
        if found == "ready":
            return seconds, now
    is_late = time.perf_counter() - begin >= MAX_SECONDS
    what = f"was not ready within {MAX_SECONDS:g} s" if is_late else "ended"
    raise SystemExit(f"error: the server {what}: {line.strip()}")


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.communicate()


def _kill(process: subprocess.Popen[str]) -> None:
    """End a server with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _first_token(port: int) -> None:
    body = json.dumps({"inputs": "The first word:", "parameters": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", body, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=MAX_SECONDS) as answer:
            answer.read()
    except (OSError, HTTPException) as error:
        raise SystemExit(f"error: the server gave no token: {error}") from error


def _processor_seconds() -> float:
    """Of all children that have ended, and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; what does not fit together ends the program in one line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--starts", type=int, default=5, help="that are measured, after one that is not")
    arguments = parser.parse_args(argv[:at])
    if arguments.starts < 1:
        parser.error(f"--starts must be >= 1, given {arguments.starts}")
    arguments.flags = argv[at + 1 :]
    return arguments


def main() -> None:
    """Measure, print a line for each phase, and the JSON."""
    arguments = parse()
    start(arguments.model, arguments.flags)
    starts = [start(arguments.model, arguments.flags) for _ in range(arguments.starts)]
    phases = [phase for phase in starts[0] if all(phase in one for one in starts)]
    medians = {phase: median(one[phase] for one in starts) for phase in phases}
    for phase, seconds in medians.items():
        print(f"{phase:<18} {seconds:6.2f} s")
    totals = [one["total"] for one in starts]
    summary = {"benchmark": "startup", "model": arguments.model, "flags": arguments.flags, "totals": totals}
    print(json.dumps(summary | {"medians": medians}))


if __name__ == "__main__":
    main()
