"""How long does a start take, from the command to the first token of an answer, with the model in the cache?

Each start is a new `funitel` on a free port, which is asked for one token as soon as it says that it is ready, and
then ended. Phases end where a line of its log arrives; what several processes do at once is not told apart. The time of
processors is that of all processes of the deployment. Medians of several starts count; the first one, which may find
neither files in memory nor the fused step compiled, is not measured. Flags after `--` are handed on.

    python benchmarks/startup.py smollm2-135m-instruct --starts 5 -- --quantize int8

The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from statistics import median

from funitel.launcher.sockets import free_port

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
READY_SECONDS = 300.0


def start(model: str, flags: Sequence[str]) -> dict[str, float]:
    """Start a server, ask for a token, end it. Seconds of each phase, of all of them, and of processors."""
    port = free_port()
    command = [*PROGRAM, "--model-id", model, "--port", str(port), *flags]
    before = _processor_seconds()
    begin = last = time.perf_counter()
    seconds = {}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        pending, lines = dict(PHASES), []
        for line in process.stdout:
            lines.append(line)
            now = time.perf_counter()
            found = next((phase for phase, words in pending.items() if words in line), None)
            if found is not None:
                seconds[found], last = now - last, now
                del pending[found]
            if found == "ready":
                break
        else:
            raise SystemExit(f"error: the server ended: {lines[-1].strip() if lines else 'it said nothing'}")
        _first_token(port)
        seconds[FIRST_TOKEN] = time.perf_counter() - last
        seconds["total"] = time.perf_counter() - begin
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    return seconds | {"processors": _processor_seconds() - before}


def _first_token(port: int) -> None:
    body = json.dumps({"inputs": "The first word:", "parameters": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=READY_SECONDS) as answer:
        answer.read()


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
    medians = {phase: median(one[phase] for one in starts) for phase in starts[0]}
    for phase, seconds in medians.items():
        print(f"{phase:<18} {seconds:6.2f} s")
    totals = [one["total"] for one in starts]
    summary = {"benchmark": "startup", "model": arguments.model, "flags": arguments.flags, "totals": totals}
    print(json.dumps(summary | {"medians": medians}))


if __name__ == "__main__":
    main()
