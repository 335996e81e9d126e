"""What one API key learns of the others on its server: of what they have sent, nothing."""

import asyncio
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.clients import client_of
from funitel_testing.servers import Server, descendants, wait_until

LONG = 150  # words of a prompt, of some tokens each
POOL_TOKENS = 20_000
MOST_CACHED = 0.9  # of a prompt that was sent before: all but its last block


def record(name: str, key: str, **fields: str) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return json.dumps({"name": name, "sha256": digest, **fields})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of keys: two of their own, two of one group, a bare one."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    grouped = [record(name, name, group="research") for name in ("c", "d")]
    path.write_text("\n".join([record("a", "a"), record("b", "b"), *grouped, "bare", ""]))
    return path


@pytest.fixture
def server(launch: Any, tiny_model: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server with room for all that the tests leave in the cache."""
    monkeypatch.setenv("FUNITEL_API_KEY", "setting")
    flags = ("--model-id", str(tiny_model), "--dtype", "float32", "--api-key-file", str(keys))
    server: Server = launch(*flags, "--max-batch-total-tokens", str(POOL_TOKENS))
    return server


async def cached(client: httpx.AsyncClient, key: str, prompt: str, **fields: Any) -> float:
    """The share of a prompt that was found in the cache, 1 for all that can be."""
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    answer = await client.post("/v1/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] > LONG
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return float(found > MOST_CACHED * usage["prompt_tokens"]) or found / usage["prompt_tokens"]


def prompt_of(number: int) -> str:
    return f"{number} " + "a b c " * (LONG // 3)


async def test_a2_a_key_finds_what_its_group_has_sent_and_nothing_else(server: Server) -> None:
    async with client_of(server.url) as client:
        prompt = prompt_of(1)
        assert [await cached(client, key, prompt) for key in ("a", "b", "bare", "setting")] == [0, 0, 0, 0]
        assert [await cached(client, key, prompt) for key in ("a", "b", "bare", "setting")] == [1, 1, 1, 1]
        assert [await cached(client, key, prompt_of(2)) for key in ("c", "d", "a")] == [0, 1, 0]
        for salt in ("s", "a", "research"):
            assert [await cached(client, key, prompt_of(3), cache_salt=salt) for key in ("a", "b", "a")] == [0, 0, 1]
        assert [await cached(client, key, prompt_of(4), cache_salt="s") for key in ("c", "d")] == [0, 1]


async def test_a2_neither_a_metric_nor_a_log_line_nor_an_event_tells_of_another_key(server: Server) -> None:
    def hits() -> float:
        return server.metrics()["funitel_prefix_cache_hit_tokens_total"]

    body = {"messages": [{"role": "user", "content": prompt_of(30)}], "max_tokens": 1, "stream": True}
    body |= {"stream_options": {"include_usage": True}}

    async def found(key: str) -> int:
        answer = await client.post("/v1/chat/completions", json=body, headers=bearer(key))
        [count] = re.findall(r'"cached_tokens":(\d+)', answer.text)
        return int(count)

    async with client_of(server.url) as client:
        assert await found("a") == 0
        before, size = hits(), server.log.stat().st_size
        assert await found("b") == 0
        assert hits() == before
        logged = await asyncio.to_thread(server.log.read_text)
        assert "cached_tokens" not in logged[size:], "the access log leaves a zero out"
        assert await found("b") > LONG
        assert hits() > before


def test_a2_a_key_that_is_replaced_under_its_name_finds_its_prefixes(server: Server, keys: Path) -> None:
    def found(key: str) -> float:
        async def ask() -> float:
            async with client_of(server.url) as client:
                return await cached(client, key, prompt_of(40))

        return asyncio.run(ask())

    def is_known() -> bool:
        return httpx.get(f"{server.url}/v1/responses/x", headers=bearer("a2")).status_code != 401

    before = keys.read_text()
    assert found("a") == 0
    keys.write_text(before.replace(record("a", "a"), record("a", "a2")).replace('"name": "b"', '"name": "b2"'))
    try:
        wait_until(is_known, 30)
        assert [found(key) for key in ("a2", "b", "c")] == [1, 0, 0]
    finally:
        keys.write_text(before)


def test_a4_children_have_neither_the_port_nor_the_keys(server: Server) -> None:
    """Of all processes, only the launcher, which has it for the next keeper, and the keeper have the port."""
    with httpx.Client(base_url=server.url, headers=bearer("setting"), timeout=60) as client:
        message = {"role": "user", "content": "hi"}
        assert client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 1}).status_code == 200
        grammar = {"type": "regex", "value": "a|b"}
        body = {"inputs": "hi", "parameters": {"max_new_tokens": 1, "grammar": grammar}}
        assert client.post("/generate", json=body).status_code == 200
    listening = _listening_sockets(server.port)
    assert len(listening) == 1
    router, keeper = server.router_pid(), server.keeper_pid()
    assert b"API_KEY" not in Path(f"/proc/{keeper}/environ").read_bytes()
    sandboxes = {pid for pid in descendants(router) if pid != router}
    assert len(sandboxes) >= 2
    for pid in descendants(server.process.pid) - {server.process.pid, keeper}:
        files = {name: os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
        assert not listening & set(files.values()), pid
        if pid in sandboxes:
            assert sorted(files) == ["0", "1", "2"]
            assert b"API_KEY" not in Path(f"/proc/{pid}/environ").read_bytes()


def _listening_sockets(port: int) -> set[str]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
