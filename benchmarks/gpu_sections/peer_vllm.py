"""vLLM's offline engine on the same weights, beside our server at requests of the same lengths.

vLLM is in its best light: no HTTP, no texts, and each size of a step that occurs recorded. If its engine does not start
compiled, the next process starts it with CUDA graphs alone, and another one without them.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from funitel_testing.servers import MARK, marked
from gpu_sections import checkpoint
from gpu_sections.figures import Facts, Line
from gpu_sections.plan import Plan

AIM = 1.0  # times as many tokens a second
WAYS = ("compile", "graphs", "eager")
ENGINE = Path(__file__).with_name("vllm_engine.py")
MAX_TOKENS = 2048  # of a stream
GONE_SECONDS = 10.0  # for the processes of an engine to be gone, before they are killed
ERROR_CHARS = 80  # of a failed start, in its line
SWITCHES = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer may be absent
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "CUDA_MODULE_LOADING": "LAZY",
}
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """Every part of the first way in which the engine starts."""
    folder = checkpoint.ensure(plan)
    if plan.is_gpu:  # the engine's share of the memory is one of all of it
        gc.collect()
        torch.cuda.empty_cache()
    failed: list[str] = []
    for way in WAYS:
        has_started, errors = False, list[str]()
        for part in _parts(plan, folder, way):
            if part["part"] == "skipped":
                yield Line("vllm", "vLLM", None, f"skipped: {part['reason']}")
                return
            if "error" in part:
                errors.append(f"{way}, {part['part']}: {part['error']}")
                continue
            has_started = has_started or part["part"] == "start"
            yield from _lines(plan, facts, way, part)
        if has_started:
            failed = errors
            break
        failed += errors
        yield Line(f"vllm_{way}", f"vLLM, {way}", None, f"failed: {errors[0][:ERROR_CHARS]}")
    if failed:
        raise RuntimeError("; ".join(failed))


def _lines(plan: Plan, facts: Facts, way: str, part: Mapping[str, Any]) -> Iterator[Line]:
    name = part["part"]
    many = f"vLLM, {plan.streams} streams of {plan.context} + {plan.answer} tokens"
    if name == "start":
        title = f"vLLM {part['version']} ({way}): start, until it is ready"
        yield Line("vllm_start", title, part["seconds"], "s")
    elif name == "whole":
        rate = part["tokens_per_s"]
        title = f"vLLM, {plan.peer_streams} streams of {plan.context} + {plan.peer_answer} tokens, all of it"
        yield Line("vllm", title, rate, "tokens/s")
        if "http_whole" in facts:
            ratio = facts["http_whole"] / rate
            yield Line("vllm_ratio", "our server over HTTP, times vLLM's engine", ratio, "times", ratio, AIM)
    elif name == "cached" and "prompt_tokens_per_s" in part:
        title = f"vLLM, {plan.streams} new prompts of {plan.context} tokens at once"
        yield Line("vllm_prompts", title, part["prompt_tokens_per_s"], "tokens of prompts a second")
    elif name == "cached":
        unit = f"tokens/s, all of it; {part['cached_share'] * 100:.0f} % of the prompts cached"
        yield Line("vllm_cached", many, part["tokens_per_s"], unit)
    elif name == "single":
        own = facts.get("decode_1")
        ratio = part["ms_per_token"] / own if own else None
        unit = "ms a token" + (", times our step of one row" if own else "")
        yield Line("vllm_single", f"vLLM, one stream behind {plan.context} tokens", part["ms_per_token"], unit, ratio)


def _parts(plan: Plan, folder: Path, way: str) -> Iterator[dict[str, Any]]:
    """What a process with the engine says, and as an error that it ended without having started."""
    settings = {
        "model": str(folder),
        "way": way,
        "dtype": plan.dtype_name,
        "max_model_len": min(MAX_TOKENS, plan.config["max_position_embeddings"]),
        "vocab_size": plan.config["vocab_size"],
        "prompt": plan.context,
        "streams": plan.peer_streams,
        "answer": plan.peer_answer,
        "many_streams": plan.streams,
        "many_answer": plan.answer,
    }
    mark = uuid.uuid4().hex
    environment = environment_of(plan, way) | {MARK: mark}
    command = [sys.executable, "-P", str(ENGINE), json.dumps(settings)]  # -P: no module beside the script shadows one
    has_said = False
    try:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    has_said = True
                    part = json.loads(line)
                    if part["part"] == "end":  # a process of the engine may keep the pipe open
                        break
                    yield part
            except BaseException:  # this section is told to end
                process.kill()
                raise
        if not has_said:
            yield {"part": "start", "error": f"its process ended with {process.returncode}"}
    finally:
        _end(mark)


def environment_of(plan: Plan, way: str) -> dict[str, str]:
    """The environment of the engine: where vLLM has a folder of its own, no other folder is on PYTHONPATH."""
    environment = {**os.environ, **SWITCHES}
    environment |= {name: str(plan.folder / "vllm_caches" / folder) for name, folder in CACHES.items()}
    if plan.vllm_site is not None:
        environment["PYTHONPATH"] = str(plan.vllm_site)
    if way == "graphs":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return environment


def _end(mark: str) -> None:
    """Wait until the processes of an engine are gone, whose memory on the GPU the next one needs, or kill them."""
    end = time.monotonic() + GONE_SECONDS
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
