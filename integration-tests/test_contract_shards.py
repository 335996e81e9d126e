"""A client written from the wire's contract alone drives the shards; its tokens are the router's, and the oracle's.

It lives in `contract/` and runs in a process of its own, for its protobuf package has the same name as ours.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.clients import client_of, generate
from funitel_testing.servers import PLAIN, free_port
from funitel_testing.shards import shards

CONTRACT = Path(__file__).parent / "contract"
MAX_NEW_TOKENS = 12
FLAGS = ("--max-batch-total-tokens", "40000")


def run_client(model: Path, socket: Path, prompts: Path) -> dict[str, Any]:
    """What the contract's client reports; every one of its checks must hold."""
    limits = ["--max-input-tokens", "1024", "--max-prefill-tokens", "2048", "--max-total-tokens", "2048"]
    command = [sys.executable, str(CONTRACT / "client.py"), "--uds", str(socket), *limits]
    command += ["--max-new-tokens", str(MAX_NEW_TOKENS), "--prompts", str(prompts), "--prefill-details", "no"]
    command += ["--tokenizer", str(model / "tokenizer.json"), "--timeout-seconds", "240"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    failed = [check for check in report["checks"] if not check["ok"]]
    assert not failed, json.dumps(failed, indent=1)
    return report


@contextmanager
def router(model: Path, socket: Path) -> Iterator[str]:
    """A router of ours on shards that another client has used before."""
    port = free_port()
    command = [sys.executable, "-m", "funitel.router", "--tokenizer-name", str(model), "--port", str(port)]
    command += ["--hostname", "127.0.0.1", "--master-shard-uds-path", f"{socket}-0", *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health", verify=PLAIN).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("count", [1, 2])
async def test_the_contracts_client_and_our_router_get_the_same(
    count: int, demo_model: Path, tmp_path: Path, is_full: bool, figures: dict[str, object]
) -> None:
    if count == 1 and not is_full:
        pytest.skip("one shard is covered by --full")
    rows = json.loads((CONTRACT.parent / "data" / "prompts.json").read_text())
    rows = rows if is_full else [row for row in rows if row["name"] in ("english", "digits", "emoji", "long")]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(rows))
    socket = tmp_path / "shard"
    with shards(demo_model, socket, count):
        report = run_client(demo_model, socket, prompts)
        with router(demo_model, socket) as url:
            async with client_of(url) as client:
                ours = {
                    row["name"]: (await generate(client, row["prompt"], max_new_tokens=MAX_NEW_TOKENS)).ids
                    for row in rows
                }
    theirs = {
        request["prompt"]: request["token_ids"]
        for request in report["requests"]
        if request["label"].startswith("solo/greedy/")
    }
    assert theirs == ours
    figures[f"8 contract client, {count} shard(s)"] = f"{len(report['checks'])} checks hold, {len(ours)} prompts equal"


async def test_two_ranks_share_what_they_hold(launch: Any, figures: dict[str, object]) -> None:
    server = launch("--num-shard", "2", *FLAGS)
    metrics = server.metrics()

    def by_rank(name: str) -> list[float]:
        return [metrics[f'{name}{{rank="{rank}"}}'] for rank in (0, 1)]

    weights, kv = by_rank("funitel_sharded_weight_bytes"), by_rank("funitel_kv_bytes")
    shares = {"weights": max(weights) / sum(weights), "KV": max(kv) / sum(kv)}
    both = [w + k for w, k in zip(weights, kv, strict=True)]
    shares["both"] = max(both) / sum(both)
    figures["8 larger rank's share of two"] = {name: round(share, 3) for name, share in shares.items()}
    assert all(share <= 0.7 for share in shares.values())
