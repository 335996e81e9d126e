"""The offline API beside a server of the same model: the same tokens; and as a script that is interrupted or ends."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from funitel.llm import LLM, SamplingParams
from funitel_testing.clients import client_of, generate
from funitel_testing.servers import Server, wait_until

PROMPTS = ["The sea", "a", "One two three four " * 8, "Ünïcödé ☃", "The sea"]
TOKENS = 24


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, dtype="float32", num_threads=1, max_batch_total_tokens=4000) as llm:
        yield llm


@pytest.fixture
def server(launch: Any, tiny_model: Path) -> Server:
    found: Server = launch("--model-id", str(tiny_model), "--dtype", "float32", "--max-batch-total-tokens", "4000")
    return found


@pytest.mark.parametrize(
    ("ours", "native"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"seed": 11}, {"seed": 11, "do_sample": True}),
        ({"seed": 2**64 - 1, "temperature": 0.6, "top_p": 0.9}, {"seed": 2**64 - 1, "temperature": 0.6, "top_p": 0.9}),
        ({"seed": 5, "top_k": 12, "typical_p": 0.9}, {"seed": 5, "top_k": 12, "typical_p": 0.9}),
    ],
    ids=["greedy", "penalised", "sampled", "top_p", "top_k and typical_p"],
)
async def test_tokens_and_texts_equal_the_servers(
    server: Server, llm: LLM, ours: dict[str, Any], native: dict[str, Any]
) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, **ours), use_tqdm=False)
    async with client_of(server.url) as client:
        answers = [await generate(client, prompt, max_new_tokens=TOKENS, **native) for prompt in PROMPTS]
    assert [output.outputs[0].token_ids for output in outputs] == [tuple(answer.ids) for answer in answers]
    assert [output.outputs[0].text for output in outputs] == [answer.text for answer in answers]


async def test_a_chat_equals_the_servers(server: Server, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    # At a temperature of one and without penalties every way to count log-probabilities is the same.
    wishes = {"temperature": 1.0, "seed": 4, "max_tokens": TOKENS, "logprobs": True}
    async with client_of(server.url) as client:
        response = await client.post("/v1/chat/completions", json={"messages": messages, **wishes})
    (choice,) = response.json()["choices"]
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=TOKENS, logprobs=0)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason) == (choice["message"]["content"], choice["finish_reason"])
    said = sum(token["logprob"] for token in choice["logprobs"]["content"])
    assert completion.cumulative_logprob == pytest.approx(said, abs=1e-3)


def script(tiny_model: Path, body: str) -> "subprocess.Popen[str]":
    """A Python program with a loaded `llm`, in a group of its own."""
    head = f"""
        from funitel.llm import LLM, SamplingParams
        llm = LLM({str(tiny_model)!r}, num_threads=1, max_batch_total_tokens=4000)
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    environ = os.environ | {"PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_ctrl_c_ends_a_script_at_once_and_leaves_nothing(tiny_model: Path) -> None:
    forever = "SamplingParams(max_tokens=None, ignore_eos=True, n=400)"
    process = script(tiny_model, f"print('ready', flush=True)\nllm.generate(['a'] * 50, {forever}, use_tqdm=False)")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGINT, 130), err
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    wait_until(lambda: not group_lives(process.pid), 5)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_thread_may_outlive_the_main_one(tiny_model: Path) -> None:
    process = script(
        tiny_model,
        """
        import threading, time
        def work():
            time.sleep(0.5)
            (output,) = llm.generate("a", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
            print(len(output.outputs[0].token_ids), flush=True)
        threading.Thread(target=work).start()
        """,
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "5\n"), err
    assert "Traceback" not in err
