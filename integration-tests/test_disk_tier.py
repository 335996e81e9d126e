"""The disk tier of a whole server: restarts, kill -9, several ranks and damage change no text, and hits save time."""

import importlib.util
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.servers import Server, run_launcher, serving

TINY = ("--dtype", "float32", "--block-size", "4", "--num-threads", "1")
PROMPTS = [f"{number} bottles and {'a cat or two sat on a mat ' * 3}" for number in range(8)]
GB = str(8 / 1024)  # 8 MiB


@contextmanager
def server_of(model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    folder.mkdir(exist_ok=True)
    with serving(folder, "--model-id", str(model), *flags) as server:
        yield server


def complete(server: Server, prompt: str, max_tokens: int = 12, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Greedy text, and usage."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    return answer["choices"][0]["text"], answer["usage"]


def texts(server: Server) -> list[str]:
    return [complete(server, prompt)[0] for prompt in PROMPTS]


def details(usage: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert sum(found.values()) == usage["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Texts without a cache."""
    with server_of(tiny_model, tmp_path_factory.mktemp("plain"), *TINY, "--prefix-caching", "false") as server:
        return texts(server)


def damage(path: Path, number: int) -> None:
    """Flip a bit in every half page behind the head of a file."""
    chance = random.Random(number)
    with path.open("r+b") as file:
        for at in range(4096, path.stat().st_size, 2048):
            file.seek(at)
            part = bytearray(file.read(2048))
            if any(part):
                part[chance.randrange(len(part))] ^= 1 << chance.randrange(8)
                file.seek(at)
                file.write(part)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restart_and_damage_change_no_text(
    tiny_model: Path, tmp_path: Path, expected: list[str], num_ranks: int
) -> None:
    disk = tmp_path / "kv"
    small = (*TINY, "--max-batch-total-tokens", "512", "--num-shard", str(num_ranks))
    flags = (*small, "--kv-disk-gb", GB, "--kv-disk-dir", str(disk))
    with server_of(tiny_model, tmp_path / "a", *flags) as server:
        assert texts(server) == expected
        assert texts(server) == expected
        usage = complete(server, PROMPTS[0])[1]
        assert details(usage)["disk"] > 0
        assert len(list(disk.iterdir())) == num_ranks
        assert {path.stat().st_mode & 0o777 for path in disk.iterdir()} == {0o600}
        line = server.wait_log("cached_tokens_disk=")
        assert re.search(r"cached_tokens=\d+ .*cached_tokens_disk=\d+", line)
    with server_of(tiny_model, tmp_path / "b", *flags) as server:
        text, usage = complete(server, PROMPTS[0])
        assert text == expected[0]
        assert details(usage) == {"memory": 0, "disk": (usage["prompt_tokens"] - 1) // 4 * 4}
        assert texts(server) == expected
        assert server.metrics()['funitel_prefix_cache_tier_hit_tokens_total{tier="disk"}'] > 0
        damage(max(disk.iterdir()), 1)  # of the last rank alone
        assert texts(server) == expected
        assert server.metrics()["funitel_tier_lost_slots_total"] > 0
    for path in disk.iterdir():
        damage(path, 2)
    with server_of(tiny_model, tmp_path / "c", *flags) as server:
        assert texts(server) == expected
        assert not server.error_lines()


@pytest.mark.parametrize("attempt", range(2))
def test_kill_9_in_the_middle_of_writes_changes_no_text(
    tiny_model: Path, tmp_path: Path, expected: list[str], attempt: int
) -> None:
    flags = (*TINY, "--max-batch-total-tokens", "512", "--kv-disk-gb", GB, "--kv-disk-dir", str(tmp_path / "kv"))
    with server_of(tiny_model, tmp_path / "a", *flags) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for number in range(3 + attempt):
                body = {"prompt": f"{number} kilometres {PROMPTS[number]}", "max_tokens": 40, "temperature": 0}
                with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                    next(answer.iter_bytes())
            [shard] = server.shard_pids()
            os.kill(shard, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and server.shard_pids() in ([], [shard]):
            time.sleep(0.2)
        server.wait_ready()
        assert texts(server) == expected
        assert texts(server) == expected


def test_the_answer_of_the_native_route_tells_tiers(tiny_model: Path, tmp_path: Path) -> None:
    flags = (*TINY, "--kv-disk-gb", GB, "--kv-disk-dir", str(tmp_path / "kv"))
    with server_of(tiny_model, tmp_path / "a", *flags) as server:
        body = {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 3, "details": True}}
        for _ in range(2):
            found = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["details"]
        assert found["cached_tokens"] > 40
        assert found["cached_tokens_by_tier"] == {"memory": found["cached_tokens"], "disk": 0}
        last = httpx.post(f"{server.url}/generate_stream", json=body, timeout=60).text.strip().splitlines()[-1]
        assert f'"cached_tokens":{found["cached_tokens"]}' in last


def test_what_cannot_be_is_told_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for flags, message in (
        (("--kv-disk-gb", "1", "--kv-disk-dir", str(tmp_path / "file")), "--kv-disk-dir"),
        (("--kv-disk-gb", "0.00001", "--kv-disk-dir", str(tmp_path)), "no room for a block"),
        (("--preemption-mode", "swap"), "--preemption-mode swap needs slots"),
    ):
        ended = run_launcher("--model-id", str(tiny_model), *TINY, *flags)
        assert ended.code != 0
        assert message in ended.last_line


def test_a_prefix_of_900_tokens_is_found_in_both_tiers(
    demo_model: Path, tmp_path: Path, figures: dict[str, object], is_full: bool
) -> None:
    """Row D11: tokens reported, time to first token, the same text with the cache on and off; with --full expiry."""
    story = "The cat sat on the mat and the dog lay on the log. " * 69  # some 900 tokens

    def first_token(prompt: str) -> float:
        begin = time.monotonic()
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
        return time.monotonic() - begin

    asks = ["Who sat?", "Where did the dog lie?"]
    with server_of(demo_model, tmp_path / "off", "--prefix-caching", "false") as server:
        plain = [complete(server, story + ask)[0] for ask in asks]
    flags = ("--max-batch-total-tokens", "2048", "--kv-disk-gb", "0.25", "--kv-disk-dir", str(tmp_path / "kv"))
    with server_of(demo_model, tmp_path / "on", *flags, "--prefix-cache-ttl", "30") as server:
        complete(server, "warm up")
        misses = [first_token(f"{number}. {story}Who?") for number in range(3)]
        hits = [first_token(f"{number}. {story}Where?") for number in range(3)]
        assert [complete(server, story + ask)[0] for ask in asks] == plain
        used = details(complete(server, story + asks[0])[1])
        assert used["memory"] + used["disk"] > 800
        samples = server.metrics()
        assert samples['funitel_prefix_cache_tier_hit_tokens_total{tier="disk"}'] > 800
        begin = time.monotonic()
        ratio = statistics.median(hits) / statistics.median(misses)
        figures["D11 time to first token, 900-token prefix on disk, hit / miss"] = round(ratio, 3)
        assert ratio < 0.4
        if not is_full:
            return
        time.sleep(max(0.0, begin + 31 - time.monotonic()))
        text, usage = complete(server, story + asks[0])
        assert (text, usage["prompt_tokens_details"]["cached_tokens"]) == (plain[0], 0)
        assert server.metrics()["funitel_prefix_cache_expired_blocks_total"] > 50


def test_a_prefix_that_was_not_used_expires_in_both_tiers(
    tiny_model: Path, tmp_path: Path, expected: list[str]
) -> None:
    flags = ("--max-batch-total-tokens", "512", "--kv-disk-gb", GB, "--kv-disk-dir", str(tmp_path / "kv"))
    with server_of(tiny_model, tmp_path / "server", *TINY, *flags, "--prefix-cache-ttl", "2") as server:
        assert texts(server) == expected
        assert complete(server, PROMPTS[-1])[1]["prompt_tokens_details"]["cached_tokens"] > 0
        time.sleep(3)
        text, usage = complete(server, PROMPTS[-1])
        assert (text, usage["prompt_tokens_details"]["cached_tokens"]) == (expected[-1], 0)
        assert server.metrics()["funitel_prefix_cache_expired_blocks_total"] > 50


def test_the_benchmark_finds_every_prefix_again(tiny_model: Path, figures: dict[str, object]) -> None:
    """The short form of `benchmarks/disk_tier.py`."""
    path = Path(__file__).parent.parent / "benchmarks" / "disk_tier.py"
    spec = importlib.util.spec_from_file_location("disk_tier_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flags = ("--dtype", "float32", "--num-threads", "1")
    found = module.measure(str(tiny_model), 12, 40, 3, 0.05, 512, flags)
    figures["disk tier, 12 prompts after a restart"] = found
    assert (found["prompts_found"], found["texts_that_differ"]) == (1.0, 0)
    assert found["tokens_found"] > 0.9
    assert found["tokens_found_on_disk"] > 0.9 * 12 * found["prompt_tokens_median"]
