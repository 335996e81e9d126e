"""A model over two processes gives the text of one, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from funitel.llm import LLM, FunitelError, RequestOutput, SamplingParams, StartupError
from funitel_testing.servers import alive, descendants

PARAMS = (SamplingParams(temperature=0, max_tokens=20), SamplingParams(seed=3, max_tokens=20, ignore_eos=True, n=2))
SCRIPT = """
import sys
from funitel.llm import LLM
llm = LLM(sys.argv[1], num_shard=2, num_threads=1, max_batch_total_tokens=400)
print(*llm._model._finalizer.peek()[2][2].pids, flush=True)
sys.stdin.read()
"""


def gone(pids: set[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pids)


def said(outputs: list[RequestOutput]) -> list[list[Any]]:
    return [[(each.text, each.token_ids) for each in output.outputs] for output in outputs]


def test_two_shards_say_what_one_says(model: Path) -> None:
    prompts = ["Split", "in two"]
    sizes: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "block_size": 4, "max_batch_total_tokens": 4000}
    with LLM(model, **sizes) as whole:
        expected = [whole.generate(prompts, params, use_tqdm=False) for params in PARAMS]
    before = descendants(os.getpid())
    with LLM(model, num_shard=2, **sizes) as split:
        pids = descendants(os.getpid()) - before
        assert len(pids) == 2
        found = [split.generate(prompts, params, use_tqdm=False) for params in PARAMS]
        handle = split.start_request("Split", PARAMS[1])
        handle.pause()
        handle.resume()
        outputs = list(handle)
        with pytest.raises(FunitelError):
            split.generate(["x" * 300], PARAMS[0], use_tqdm=False)
    assert gone(pids)
    assert [said(outputs) for outputs in found] == [said(outputs) for outputs in expected]
    assert said(outputs[-1:]) == said(expected[1][:1])


def test_a_shard_that_cannot_load_is_named(model: Path) -> None:
    before = descendants(os.getpid())
    with pytest.raises(StartupError, match="shard [0-9] ended with 1 while it loaded: .*") as caught:
        LLM(model, num_shard=7, num_threads=1)  # no number of heads is a multiple of that
    assert "\n" not in caught.value.message
    assert gone(descendants(os.getpid()) - before)


def test_shards_end_with_a_program_that_is_killed(model: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        pids = set(map(int, program.stdout.readline().split()))
        assert len(alive(pids)) == 2
        program.send_signal(signal.SIGKILL)
    assert gone(pids)
