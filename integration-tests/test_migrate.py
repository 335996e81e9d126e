"""`docs/migrate.md`, followed to the letter on a compose file of TGI, reaches TGI's answers."""

import difflib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml

from funitel.launcher.settings import LauncherSettings
from funitel.proto.settings.options import flag_of
from funitel.proto.settings.tgi_flags import INERT, REFUSED, REFUSED_VALUES, TRANSLATED_VALUES
from funitel.router.telemetry import metrics
from funitel_testing.servers import Server, free_port, run_launcher
from funitel_testing.truth import Truth

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "migrate.md").read_text()
BEFORE = DOCS / "examples" / "compose" / "tgi.yaml"
AFTER = DOCS / "examples" / "compose" / "funitel.yaml"
PROMPTS = ("The capital of France is", "Once upon a time, there lived a", "1, 2, 3, 4, 5, 6,", "def add(a, b):\n")
MAX_NEW_TOKENS = 12
ROUNDED = 0.02  # of a logit, lost to float16 where two tokens are that close
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True)
class Service:
    """The only service of a compose file, with its variables replaced."""

    command: list[str]
    environ: dict[str, str]


def service_of(path: Path, environ: dict[str, str]) -> Service:
    """Read a compose file as `docker compose` does."""

    def replaced(text: str) -> str:
        return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: environ.get(found[1]) or found[2], text)

    (service,) = yaml.safe_load(path.read_text())["services"].values()
    variables = {name: replaced(value) for name, value in service["environment"].items()}
    return Service(shlex.split(replaced(service["command"])), variables)


def test_the_diff_of_the_page_is_the_whole_difference() -> None:
    before, after = ("".join(path.read_text().splitlines(True)[1:]) for path in (BEFORE, AFTER))
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    (shown,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert [line[0] + line[2:] for line in changed] == shown.splitlines()


def test_the_compose_file_has_real_flags() -> None:
    flags = {word for word in service_of(BEFORE, {}).command if word.startswith("--")}
    known = {flag_of(field.name) for field in fields(LauncherSettings)} | {
        flag_of(row.name) for row in (*INERT, *REFUSED)
    }
    assert flags <= known
    assert f"with {len(flags)} flags" in PAGE


def table(head: str) -> list[str]:
    """Lines of the table of the page that begins with `head`."""
    lines = PAGE.split(f"\n{head}", 1)[1].splitlines()[2:]
    return lines[: lines.index("")]


def _names(row: Any) -> str:
    names = [flag_of(row.name)] if "launcher" in row.flag else []
    return ", ".join(f"`{name}`" for name in names or [row.env])


def test_the_table_of_flags_without_effect_is_the_code() -> None:
    rows = [row for row in INERT if "launcher" in (*row.flag, *row.variable)]
    assert table("| flag or variable of the launcher") == [f"| {_names(row)} | {row.why} |" for row in rows]


def test_the_table_of_refused_flags_is_the_code() -> None:
    rows = [
        f"| {_names(row)} | {f'all but `{row.allowed[0]}`' if row.allowed else 'any'} | {row.why} |"
        for row in REFUSED
        if "launcher" in row.flag
    ]
    for name, values in REFUSED_VALUES.items():
        for why in dict.fromkeys(values.values()):
            named = ", ".join(f"`{value}`" for value, reason in values.items() if reason == why)
            rows.append(f"| `{flag_of(name)}` | {named} | {why} |")
    assert table("| flag | values |") == rows


def test_the_table_of_values_with_another_name_is_the_code() -> None:
    rows = [
        f"| `{flag_of(name)}` | `{value}` | `{meant.value}` | {meant.why} |"
        for name, values in TRANSLATED_VALUES.items()
        for value, meant in values.items()
    ]
    assert table("| flag | TGI's value |") == rows


def test_flags_said_to_differ_are_honoured() -> None:
    honoured = {flag_of(field.name) for field in fields(LauncherSettings)}
    named = {
        flag for line in table("| flag | what differs") for flag in re.findall(r"`(--[\w-]+)`", line.split("|")[1])
    }
    assert named
    assert named <= honoured


def test_metrics_named_on_the_page_exist() -> None:
    source = Path(metrics.__file__).read_text()
    named = set(re.findall(r"`((?:tgi|funitel)_\w+?)`", PAGE))
    assert len(named) > 10
    assert {name for name in named if f'"{name.removesuffix("_total")}"' not in source} == {"tgi_batch_total_tokens"}
    assert "| `tgi_batch_total_tokens` | is absent here" in PAGE


def test_a_flag_that_cannot_be_honoured_is_refused_with_the_line_of_the_page(tiny_model: Path) -> None:
    given = {"MODEL_ID": str(tiny_model), "TGI_PORT": str(free_port())}
    service = service_of(BEFORE, given)
    ended = run_launcher(*service.command, "--quantize", "exl2", environ=service.environ)
    (shown,) = re.findall(r"```text\n *(error: .*)\n", PAGE)
    assert (ended.code, ended.last_line) == (1, shown)


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The launcher with the new file's command and environment, and nothing else."""
    service = service_of(AFTER, {"MODEL_ID": str(demo_model), "TGI_PORT": str(free_port())})
    running = Server(tmp_path_factory.mktemp("server"), *service.command, environ=service.environ)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def ask(server: Server, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120)


def events(answer: httpx.Response) -> list[Any]:
    lines = [line[len("data:") :].strip() for line in answer.text.splitlines() if line.startswith("data:")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_its_log_says_what_has_no_effect(server: Server) -> None:
    lines = server.log.read_text().splitlines() + server.out.read_text().splitlines()
    said = [json.loads(line)["message"] for line in lines]  # --json-output: every line, of all processes
    said = [message for message in said if "is accepted and changes nothing" in message]
    assert [message.split(" is accepted")[0] for message in said] == ["--usage-stats off", "TGI_WIGGLE_ROOM=0.9"]


def test_the_facts_are_those_of_the_flags(server: Server, demo_model: Path) -> None:
    info = httpx.get(f"{server.url}/info").json()
    expected = {
        "model_id": str(demo_model),
        "max_concurrent_requests": 64,
        "max_best_of": 3,
        "max_stop_sequences": 6,
        "max_input_tokens": 1024,
        "max_total_tokens": 1536,
        "validation_workers": 4,
        "max_client_batch_size": 8,
        "router": "text-generation-router",
        "speculate": 2,
    }
    assert {name: info[name] for name in expected} == expected
    assert len(server.shard_pids()) == 2


def test_greedy_tokens_are_those_of_transformers(server: Server, demo_model: Path, oracle: ModuleType) -> None:
    truth = Truth(oracle.load_model(demo_model, "cpu"), oracle.load_tokenizer(demo_model))
    for prompt in PROMPTS:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": MAX_NEW_TOKENS, "details": True}}
        answer = ask(server, "/generate", body).json()
        assert set(answer) == {"generated_text", "details"}
        details = answer["details"]
        assert set(details) == {"finish_reason", "generated_tokens", "seed", "prefill", "tokens"}
        assert (details["seed"], details["prefill"]) == (None, [])
        assert all(set(token) == {"id", "text", "logprob", "special"} for token in details["tokens"])
        ids = [token["id"] for token in details["tokens"]]
        assert max(truth.gaps(truth.encode(prompt), ids)) <= ROUNDED, prompt
        assert details["generated_tokens"] == len(ids) == MAX_NEW_TOKENS
        assert details["finish_reason"] == "length"
        streamed = events(ask(server, "/generate_stream", body))
        assert [event["token"]["id"] for event in streamed] == ids
        assert [event["index"] for event in streamed] == list(range(1, len(ids) + 1))
        assert [event["generated_text"] for event in streamed] == [None] * (len(ids) - 1) + [answer["generated_text"]]
        assert set(streamed[-1]["details"]) == {"finish_reason", "generated_tokens", "seed", "input_length"}
        assert ask(server, "/", body).json()[0]["details"]["tokens"] == details["tokens"]


def test_sampling_stops_and_candidates(server: Server) -> None:
    sampled = {"do_sample": True, "best_of": 3, "max_new_tokens": 4, "details": True}
    (answer,) = ask(server, "/", {"inputs": "The sea", "parameters": sampled | {"return_full_text": False}}).json()
    assert len(answer["details"]["best_of_sequences"]) == 2
    assert isinstance(answer["details"]["seed"], int)
    seeded = {"inputs": "The sea", "parameters": {"do_sample": True, "seed": 7, "max_new_tokens": 6}}
    assert ask(server, "/generate", seeded).json() == ask(server, "/generate", seeded).json()
    stopped = {"inputs": "1, 2, 3, 4,", "parameters": {"stop": ["7"], "max_new_tokens": 20, "details": True}}
    found = ask(server, "/generate", stopped).json()
    assert (found["generated_text"], found["details"]["finish_reason"]) == (" 5, 6, 7", "stop_sequence")
    top = {"inputs": "The sea", "parameters": {"max_new_tokens": 2, "top_n_tokens": 3, "details": True}}
    assert [len(row) for row in ask(server, "/generate", top).json()["details"]["top_tokens"]] == [3, 3]


def test_tokens_of_a_prompt(server: Server, demo_model: Path, oracle: ModuleType) -> None:
    found = ask(server, "/tokenize", {"inputs": PROMPTS[0]}).json()
    assert [token["id"] for token in found] == oracle.load_tokenizer(demo_model).encode(PROMPTS[0]).ids
    assert [PROMPTS[0][token["start"] : token["stop"]] for token in found] == [token["text"] for token in found]


def test_chats(server: Server, demo_model: Path) -> None:
    body = {"model": "tgi", "messages": QUESTION, "max_tokens": 20, "temperature": 0}
    answer = ask(server, "/v1/chat/completions", body).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == str(demo_model)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert set(answer["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    *chunks, done = events(ask(server, "/v1/chat/completions", body | {"stream": True}))
    assert done == "[DONE]"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == answer["choices"][0]["message"]["content"]
    prompts = {"model": "tgi", "prompt": list(PROMPTS) * 2, "max_tokens": 2, "temperature": 0}
    assert len(ask(server, "/v1/completions", prompts).json()["choices"]) == 8


REFUSALS = (
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 1.0}, "top_p"),
    ({"stop": ["a"] * 7}, "stop"),
    ({"best_of": 4, "do_sample": True}, "best_of"),
    ({"truncate": 1025}, "truncate"),
)


@pytest.mark.parametrize(("parameters", "field"), REFUSALS)
def test_refusals_have_the_shape_of_tgi(server: Server, parameters: dict[str, Any], field: str) -> None:
    answer = ask(server, "/generate", {"inputs": "The sea", "parameters": parameters})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert set(answer.json()) == {"error", "error_type"}
    assert answer.json()["error"].startswith("Input validation error: ")
    assert field in answer.json()["error"]


def test_headers_metrics_and_probes(server: Server) -> None:
    headers = ask(server, "/generate", {"inputs": "The sea", "parameters": {"max_new_tokens": 2}}).headers
    names = ("compute-type", "compute-time", "total-time", "validation-time", "queue-time", "inference-time")
    assert all(f"x-{name}" in headers for name in (*names, "time-per-token", "prompt-tokens", "generated-tokens"))
    assert server.metrics()["tgi_request_success"] > 0
    for path in ("/", "/health", "/ping", "/health/live", "/health/ready"):
        assert httpx.get(f"{server.url}{path}").status_code == 200
