"""Starting, stopping and dying: whatever happens to a deployment, it ends as told and leaves nothing behind."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.clients import Answer, client_of, generate, stream
from funitel_testing.servers import (
    MARK,
    Footprint,
    Server,
    alive,
    flag_value,
    free_port,
    listens,
    marked,
    serving,
    shared_memory,
    wait_until,
)
from funitel_testing.tiny import VOCAB_SIZE, save_tiny

CONTEXT = 8192
FLAGS = ("--dtype", "float32", "--max-batch-total-tokens", str(2 * CONTEXT))
TWO = (*FLAGS, "--num-shard", "2")
SOON = 5.0  # seconds from the death of one part to the end of all


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for answers that take seconds, and no token to end them early."""
    return save_tiny(
        "llama", tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT, eos_token_id=VOCAB_SIZE
    )


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*flags)` starts a launcher without waiting for it; all of them are gone after the test."""
    servers: list[Server] = []

    def run(*flags: str) -> Server:
        servers.append(Server(tmp_path, *flags))
        return servers[-1]

    yield run
    for server in servers:
        server.kill_all()


async def answers(server: Server, tokens: int = 5) -> list[int]:
    async with client_of(server.url) as client:
        return (await generate(client, "Hello", max_new_tokens=tokens)).ids


@contextmanager
def long_stream(server: Server, tokens: int) -> Iterator["asyncio.Task[Answer]"]:
    """A stream of so many tokens, running."""

    async def run() -> Answer:
        async with client_of(server.url) as client:
            return await stream(client, "Hello", max_new_tokens=tokens)

    task = asyncio.create_task(run())
    try:
        yield task
    finally:
        task.cancel()


async def until_running(server: Server, seconds: float = 10) -> None:
    """Wait until a sequence runs on the shards."""
    await until(lambda: server.metrics()["tgi_batch_current_size"] > 0, seconds)


async def until(holds: Callable[[], bool], seconds: float) -> float:
    """`wait_until` that lets other tasks run."""
    return await asyncio.to_thread(wait_until, holds, seconds)


async def failed(task: "asyncio.Task[Answer]") -> BaseException | None:
    """How a stream failed; None if it did not."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.gather(task, return_exceptions=True)), 10)
    assert task.done(), "the client still waits for a server that is gone"
    return task.exception()


# Start and stop ---------------------------------------------------------------------------------------------


async def test_start_and_stop_in_a_row(
    start: Start, model: Path, is_full: bool, figures: dict[str, object], tmp_path: Path, monkeypatch: Any
) -> None:
    rounds = 10 if is_full else 3
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    stops = []
    ids = []
    for i in range(rounds):
        server = start("--model-id", str(model), *TWO).wait_ready()
        footprint = server.footprint()
        assert len(server.shard_pids()) == 2
        assert len(marked(server.mark)) >= 4  # launcher, router, two shards, and whoever renders chats for the router
        ids.append(await answers(server))
        stops.append(await until(lambda s=server, n=(signal.SIGTERM, signal.SIGINT)[i % 2]: s.stop(n) == 0, 20))  # type: ignore[misc]
        footprint.wait_gone(0)
        assert list(temporary.iterdir()) == []
        assert server.error_lines() == []
        assert "Traceback" not in server.log.read_text()
    assert ids == [ids[0]] * rounds
    figures["9 starts and stops in a row with 2 shards"] = rounds
    figures["9 slowest stop in seconds"] = round(max(stops), 2)


async def test_two_instances_side_by_side(start: Start, model: Path) -> None:
    one = start("--model-id", str(model), *TWO)
    other = start("--model-id", str(model), *FLAGS)
    one.wait_ready()
    other.wait_ready()
    first, second = one.footprint(), other.footprint()
    assert first.uds_path != second.uds_path
    ids = await answers(one)
    assert await answers(other) == ids
    assert one.stop() == 0
    first.wait_gone(0)
    assert await answers(other) == ids
    assert other.stop() == 0
    second.wait_gone(0)


@pytest.mark.parametrize("stage", ["download", "shards"])
async def test_stopped_while_it_starts(start: Start, model: Path, stage: str) -> None:
    server = start("--model-id", str(model), *TWO)
    wanted = {"download": b"download-weights", "shards": b"serve"}[stage]
    await until(lambda: any(wanted in words for words in _children(server)), 30)
    began = await until(lambda: server.stop() == 0, 20)
    assert began < 12
    Footprint(server.mark, (server.port,), _uds_of(server), shared_memory()).wait_gone(0)
    assert server.error_lines() == []
    assert "ready:" not in server.out.read_text()


def _children(server: Server) -> list[list[bytes]]:
    found = []
    for pid in marked(server.mark) - {server.process.pid}:
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    return found


def _uds_of(server: Server) -> str:
    """A path nobody else uses stands in where the log does not name one."""
    _, _, rest = server.log.read_text().partition("shard_uds_path='")
    return rest.partition("'")[0] or f"/tmp/text-generation-server-{server.process.pid}"


# Draining ---------------------------------------------------------------------------------------------------


async def test_sigterm_lets_a_running_stream_finish(start: Start, model: Path) -> None:
    server = start("--model-id", str(model), *FLAGS).wait_ready()
    footprint = server.footprint()
    with long_stream(server, 3000) as task:
        await until_running(server)
        server.process.send_signal(signal.SIGTERM)
        refused: list[str] = []
        while not task.done() and len(refused) < 5:
            await asyncio.sleep(0.1)
            if not task.done():
                answered = await _refusal(server)
                # The signal takes a moment from the launcher to the router; from then on everything is refused.
                refused += [answered] if refused or answered != "200" else []
        answer = await task
    assert (len(answer.ids), answer.finish_reason) == (3000, "length")
    assert refused, "the stream was over before the server could refuse anything"
    assert set(refused) <= {"refused", "503"}
    assert server.stop() == 0
    footprint.wait_gone(0)


async def _refusal(server: Server) -> str:
    try:
        async with client_of(server.url) as client:
            response = await client.post("/generate", json={"inputs": "Hi", "parameters": {"max_new_tokens": 1}})
    except httpx.ConnectError:
        return "refused"
    return str(response.status_code)


async def test_a_second_sigint_does_not_wait(start: Start, model: Path) -> None:
    server = start("--model-id", str(model), *TWO, "--numa").wait_ready()
    await asyncio.to_thread(server.wait_log, "collectives=shared-memory")
    _assert_cores_apart(server)
    footprint = server.footprint()
    with long_stream(server, CONTEXT - 100) as task:
        await until_running(server)
        server.process.send_signal(signal.SIGINT)
        await asyncio.sleep(1)
        assert server.process.poll() is None, "it did not wait for the stream"
        server.process.send_signal(signal.SIGINT)
        await until(lambda: server.process.poll() is not None, 3)
        assert await failed(task) is not None
    footprint.wait_gone(0)


async def test_a_stuck_shard_is_killed_by_a_second_sigint(start: Start, model: Path) -> None:
    server = start("--model-id", str(model), *TWO)
    await until(lambda: len(server.shard_pids()) == 2, 30)
    footprint = server.footprint()
    os.kill(server.shard_pids()[1], signal.SIGSTOP)  # rank 0 now waits for it without end
    await asyncio.sleep(3)
    server.process.send_signal(signal.SIGINT)
    await asyncio.sleep(1)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    await until(lambda: server.process.poll() is not None, 3)
    footprint.wait_gone(0)


# Deaths -----------------------------------------------------------------------------------------------------


async def test_a_shard_killed_at_work_ends_the_launcher(start: Start, model: Path, figures: dict[str, object]) -> None:
    server = start("--model-id", str(model), *TWO, "--max-restarts", "0").wait_ready()
    footprint = server.footprint()
    with long_stream(server, CONTEXT - 100) as task:
        await until_running(server)
        os.kill(server.shard_pids()[1], signal.SIGKILL)
        seconds = await until(lambda: server.process.poll() is not None, SOON)
        assert await failed(task) is not None
    figures["9 kill -9 of one shard of two: seconds to the launcher's end"] = round(seconds, 2)
    assert server.process.returncode == 1
    _assert_epitaph(server, "shard rank 1 exited with code -9 (killed by SIGKILL)")
    footprint.wait_gone(0)


def _assert_cores_apart(server: Server) -> None:
    """Every thread of a shard runs on the cores the shard was given, which are no other's while there are enough."""
    shares = []
    for pid in server.shard_pids():
        tasks = (task / "status" for task in Path(f"/proc/{pid}/task").iterdir())
        allowed = {line for task in tasks for line in task.read_text().splitlines() if "Cpus_allowed_list" in line}
        assert allowed == {f"Cpus_allowed_list:\t{flag_value(pid, '--cores')}"}
        shares.append(os.sched_getaffinity(pid))
    assert len(shares) == 2
    if len(os.sched_getaffinity(0)) > 1:
        assert not set.intersection(*shares)


async def test_an_idle_shard_killed_ends_the_launcher(start: Start, model: Path) -> None:
    server = start("--model-id", str(model), *TWO, "--max-restarts", "0").wait_ready()
    footprint = server.footprint()
    os.kill(server.shard_pids()[0], signal.SIGKILL)
    await until(lambda: server.process.poll() is not None, SOON)
    assert server.process.returncode == 1
    _assert_epitaph(server, "shard rank 0 exited with code -9 (killed by SIGKILL)")
    footprint.wait_gone(0)


async def test_a_shard_killed_while_loading_ends_the_launcher(start: Start, model: Path) -> None:
    server = start("--model-id", str(model), *TWO)
    await until(lambda: len(server.shard_pids()) == 2, 30)
    footprint = server.footprint()
    os.kill(server.shard_pids()[1], signal.SIGKILL)
    await until(lambda: server.process.poll() is not None, 15)
    assert server.process.returncode == 1
    assert server.error_lines() == ["error: shard rank 1 exited with code -9 (killed by SIGKILL)"]
    footprint.wait_gone(0)


async def test_without_a_keeper_a_killed_router_ends_the_launcher(start: Start, model: Path) -> None:
    server = start("--model-id", str(model), *FLAGS, "--keeper", "false").wait_ready()
    footprint = server.footprint()
    os.kill(server.router_pid(), signal.SIGKILL)
    await until(lambda: server.process.poll() is not None, SOON)
    assert server.process.returncode == 1
    _assert_epitaph(server, "router exited with code -9 (killed by SIGKILL)")
    footprint.wait_gone(0)


def _assert_epitaph(server: Server, beginning: str) -> None:
    """One `error:` line, the last of all, that says who ended, how, and what it said last."""
    (line,) = server.error_lines()
    assert line.startswith(f"error: {beginning}: last "), line
    assert len(line) > len(f"error: {beginning}: last line: "), line
    assert server.log.read_text().splitlines()[-1] == line
    assert "Traceback" not in server.log.read_text()


async def test_a_killed_launcher_leaves_nothing(start: Start, model: Path, tmp_path: Path) -> None:
    base = tmp_path / "sockets" / "s"
    base.parent.mkdir()
    brief = ("--adopt-timeout", "1")
    server = start("--model-id", str(model), *TWO, "--shard-uds-path", str(base), *brief).wait_ready()
    footprint = server.footprint()
    with long_stream(server, CONTEXT - 100) as task:
        await until_running(server)
        server.process.kill()
        server.process.wait()
        await until(lambda: not marked(server.mark), 15)
        await failed(task)
    assert not list(base.parent.iterdir()), "the shards did not clean up after their launcher"
    footprint.wait_gone()
    again = start("--model-id", str(model), *TWO, "--shard-uds-path", str(base)).wait_ready()
    assert await answers(again)
    assert again.stop() == 0
    assert not list(base.parent.iterdir()), "a later run did not clean up"


async def test_a_launcher_killed_while_loading_leaves_nothing(start: Start, model: Path, tmp_path: Path) -> None:
    server = start("--model-id", str(model), *TWO, "--shard-uds-path", str(tmp_path / "s"))
    await until(lambda: len(server.shard_pids()) == 2, 30)
    server.process.kill()
    server.process.wait()
    await until(lambda: not marked(server.mark), 20)
    assert _locks(tmp_path) == []


def _locks(folder: Path) -> list[Path]:
    return list(folder.glob("*.lock"))


# By hand ----------------------------------------------------------------------------------------------------


@contextmanager
def by_hand(folder: Path, mark: str, *args: str, **variables: str) -> Iterator["subprocess.Popen[bytes]"]:
    """One process started without the launcher; asked to end, and killed if it does not."""
    name = f"{args[0]}-{variables.get('RANK', '0')}.log"
    with (folder / name).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *args],
            stdout=log,
            stderr=log,
            env={**os.environ, **variables, MARK: mark},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        finally:
            process.kill()
            process.wait()


async def test_shards_and_router_over_tcp(start: Start, model: Path, tmp_path: Path) -> None:
    mark = tmp_path.name
    port, *shard_ports, master_port = (free_port() for _ in range(4))
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port)}

    def shard(rank: int) -> Any:
        flags = ("--sharded", "--dtype", "float32", "--num-threads", "1")
        listen = ("--listen", f"127.0.0.1:{shard_ports[rank]}")
        return by_hand(
            tmp_path, mark, "funitel.model_server", "serve", str(model), *flags, *listen, **group, RANK=str(rank)
        )

    route = ("--tokenizer-name", str(model), "--master-shard-address", f"127.0.0.1:{shard_ports[0]}")
    limits = ("--max-batch-total-tokens", str(2 * CONTEXT), "--port", str(port))
    with shard(0) as first, shard(1) as second:
        await until(lambda: all(listens(at) for at in shard_ports), 60)
        with by_hand(tmp_path, mark, "funitel.router", *route, *limits) as router:
            await until(lambda: _is_healthy(port), 60)
            async with client_of(f"http://127.0.0.1:{port}") as client:
                ids = (await generate(client, "Hello", max_new_tokens=20)).ids
                streamed = (await stream(client, "Hello", max_new_tokens=20)).ids
        assert alive({first.pid, second.pid}) == {first.pid, second.pid}
    assert [router.returncode, first.returncode, second.returncode] == [0, 0, 0]
    assert not marked(mark)
    assert ids == streamed
    assert len(ids) == 20
    with serving(tmp_path, "--model-id", str(model), *FLAGS) as usual:
        assert await answers(usual, tokens=20) == ids


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


async def test_a8_an_address_space_bounds_the_pool_and_idle_memory_is_told(start: Start, demo_model: Path) -> None:
    """As `prlimit --as=2500000000` would start it: the usual pool of the demo model would not fit."""
    server = start("--model-id", str(demo_model))
    limit = 2_500_000_000
    resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, limit))  # before it has children
    server.wait_ready()
    assert len(await answers(server)) == 5
    metrics = server.metrics()
    assert 0 < metrics['funitel_kv_bytes{rank="0"}'] < limit / 4
    assert metrics['funitel_memory_bytes{kind="resident",rank="0"}'] > 0
    log = server.tail(10**6)
    assert "RLIMIT_AS (ulimit -v) leaves" in log
    assert "memory idle resident_bytes=" in log
    assert server.stop() == 0
