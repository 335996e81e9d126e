"""The coding agents of npm, each run once without a terminal: the protocol is judged, not what the model answers.

The server's model is random, with the tokenizer and the template of the demo model and a context long enough for what
agents send before the first word of a user.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from blame import LONG_URL, Calls, of_the_model

BIN = Path(os.environ.get("FUNITEL_CLIENTS_NPM", "")) / "node_modules" / ".bin"
QUESTION = "What is the capital of France?"
MODEL = "demo"
SECONDS = 600
# No accounts, no news, no reports: there is one server, and it is this one.
QUIET = {
    "TERM": "dumb",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "200",
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "API_TIMEOUT_MS": "500000",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "FUNITEL_KEY": "none",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home of its own, with an empty repository in `work`."""
    subprocess.run(["git", "init", "-q", tmp_path / "work"], check=True)
    return tmp_path


def run(home: Path, *command: str | Path, may_fail: bool = False, **environ: str) -> str:
    """What a command prints; one that `may_fail` prints why."""
    given = {"PATH": os.environ["PATH"], "HOME": str(home)} | QUIET | environ
    done = subprocess.run(
        command,
        cwd=home / "work",
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0 or may_fail, f"{done.stdout[-600:]} {done.stderr[-600:]}"
    return done.stdout


def claude(home: Path, url: str, *flags: str) -> dict[str, Any]:
    """The result of one run of Claude Code."""
    command = [BIN / "claude", "-p", QUESTION, "--model", MODEL, "--output-format", "json", "--max-turns", "2", *flags]
    printed = run(home, *command, may_fail=True, ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY="none")
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return found


def check_claude(result: dict[str, Any], calls: Calls) -> None:
    """Check that a run ended with an answer."""
    calls.check("/v1/messages")
    words = f"{result['subtype']}: {result.get('result') or result.get('errors')}"
    of_the_model(result.get("api_error") != "max_output_tokens", words)  # its text has no end
    of_the_model("structured_output" not in result["subtype"], words)  # it did not call the tool for it
    assert not result["is_error"], words
    assert result["subtype"] == "success", words
    assert result["usage"]["output_tokens"] > 0


def test_claude_code(home: Path, calls: Calls) -> None:
    check_claude(claude(home, LONG_URL), calls)


def test_claude_code_bare(home: Path, calls: Calls) -> None:
    check_claude(claude(home, LONG_URL, "--bare"), calls)


def test_claude_code_with_the_demo_model(home: Path, url: str, calls: Calls) -> None:
    result = claude(home, url, "--bare", "--system-prompt", "Be brief.", "--tools", "Read")
    check_claude(result, calls)
    assert result["result"].strip()


def test_claude_code_with_a_schema(home: Path, url: str, calls: Calls) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    result = claude(
        home, url, "--bare", "--system-prompt", "Be brief.", "--tools", "", "--json-schema", json.dumps(schema)
    )
    check_claude(result, calls)


def codex(home: Path, *flags: str) -> list[dict[str, Any]]:
    """The events of one run of Codex."""
    settings = home / ".codex"
    settings.mkdir()
    (settings / "config.toml").write_text(f"""
model = "{MODEL}"
model_provider = "funitel"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.funitel]
name = "funitel"
base_url = "{LONG_URL}/v1"
wire_api = "responses"
env_key = "FUNITEL_KEY"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = 500000
""")
    command = [BIN / "codex", "exec", "--json", "--skip-git-repo-check", "-s", "read-only", *flags, QUESTION]
    printed = run(home, *command, CODEX_HOME=str(settings))
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def check_codex(events: list[dict[str, Any]], calls: Calls) -> None:
    """Check that a run ended with an answer."""
    failed = [event for event in events if event["type"] in ("error", "turn.failed")]
    assert not failed, failed
    calls.check("/v1/responses")
    (ended,) = [event for event in events if event["type"] == "turn.completed"]
    assert ended["usage"]["output_tokens"] > 0
    kinds = {event["item"]["type"] for event in events if event["type"] == "item.completed"}
    of_the_model(bool(kinds & {"agent_message", "reasoning", "command_execution"}), f"no answer: {kinds}")


def test_codex(home: Path, calls: Calls) -> None:
    check_codex(codex(home), calls)


def test_codex_with_a_schema(home: Path, calls: Calls) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    path = home / "schema.json"
    path.write_text(json.dumps(schema))
    events = codex(home, "--output-schema", str(path))
    check_codex(events, calls)


def opencode(home: Path, *flags: str) -> list[dict[str, Any]]:
    """The events of one run of OpenCode."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "funitel",
        "options": {"baseURL": f"{LONG_URL}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 65536, "output": 32}}},
    }
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": f"funitel/{MODEL}",
        "small_model": f"funitel/{MODEL}",
        "provider": {"funitel": provider},
    }
    (home / "work" / "opencode.json").write_text(json.dumps(config))
    printed = run(home, BIN / "opencode", "run", "--format", "json", *flags, QUESTION)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("agent", ["build", "plan"])
def test_opencode(agent: str, home: Path, calls: Calls) -> None:
    events = opencode(home, "--agent", agent)
    types = [event["type"] for event in events]
    assert "error" not in types, events
    calls.check("/v1/chat/completions")
    assert "step_finish" in types
    ended = next(event for event in events if event["type"] == "step_finish")
    assert ended["part"]["tokens"]["output"] > 0
