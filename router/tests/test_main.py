"""The router as a process: its port, its signals, its exit codes."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from funitel.router.transport.server import bind
from funitel_testing.certificates import Authority

SCRIPT = Path(__file__).with_name("fake_router.py")
Start = Callable[..., subprocess.Popen[str]]
PATIENCE_SECONDS = 15.0
HI = {"inputs": "Hi"}


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def start(model: Path, port: int) -> Iterator[Start]:
    """`start("--flag", FAKE="fail")`: a router on `port`."""
    processes = []

    def starting(*flags: str, pass_fds: Sequence[int] = (), **variables: str) -> subprocess.Popen[str]:
        path = ":".join(entry for entry in sys.path if entry)
        environment = {"PYTHONPATH": path, "TOKENIZER_NAME": str(model), "HOSTNAME": "127.0.0.1", "PORT": str(port)}
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *flags],
            pass_fds=pass_fds,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield starting
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(port: int, status: int) -> httpx.Response:
    """Ask for the health until it has this status."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            response = httpx.get(f"http://127.0.0.1:{port}/health")
        except httpx.TransportError:
            time.sleep(0.02)
            continue
        if response.status_code == status:
            return response
        time.sleep(0.02)
    raise AssertionError(f"no {status} on port {port}")


def test_the_port_answers_before_the_shards_do(start: Start, port: int) -> None:
    process = start(FAKE="hang")
    response = wait_for(port, 503)
    assert response.json()["error_type"] == "healthcheck"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_a_start_that_fails_is_one_line_and_exit_code_1(start: Start) -> None:
    process = start(FAKE="fail")
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "error: no shard answers"
    assert "Traceback" not in errors


def test_a_model_that_is_not_there(start: Start) -> None:
    process = start("--tokenizer-name", "/nowhere")
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "/nowhere/tokenizer.json does not exist" in errors.splitlines()[-1]


def test_a_port_that_is_taken(start: Start, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        process = start()
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use"


def test_the_metrics_port_answers_metrics_and_nothing_else(start: Start, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        second = int(listener.getsockname()[1])
    start("--prometheus-port", str(second))
    wait_for(port, 200)
    metrics = httpx.get(f"http://127.0.0.1:{second}/metrics")
    assert metrics.status_code == 200
    assert "tgi_request_count" in metrics.text
    for path in ("/health", "/info", "/"):
        assert httpx.get(f"http://127.0.0.1:{second}{path}").status_code == 404
    assert httpx.post(f"http://127.0.0.1:{second}/generate", json={"inputs": "Hi"}).status_code == 404
    assert httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 200


def test_a_connection_that_never_speaks_tls_ends(start: Start, port: int, tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("server")
    flags = ("--tls-cert", files.cert, "--tls-key", files.key, "--header-timeout-seconds", "0.2")
    start(*flags)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            client = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with client:
        client.settimeout(PATIENCE_SECONDS)
        assert client.recv(1) == b""


def test_a_metrics_port_that_is_taken(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        second = taken.getsockname()[1]
        _, errors = start("--prometheus-port", str(second)).communicate(timeout=PATIENCE_SECONDS)
    assert errors.splitlines()[-1] == f"error: cannot listen on 127.0.0.1 port {second}: Address already in use"


def test_the_metrics_port_is_another(start: Start, port: int) -> None:
    process = start("--prometheus-port", str(port))
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert errors == f"error: --prometheus-port {port} is --port: leave it out, /metrics is answered there anyway\n"


def test_an_unknown_flag(start: Start) -> None:
    process = start("--no-such-flag")
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2
    assert "--no-such-flag" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(start: Start, port: int, number: int) -> None:
    process = start()
    wait_for(port, 200)
    with httpx.stream("POST", f"http://127.0.0.1:{port}/generate_stream", json={"inputs": "Hi"}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data:")
        process.send_signal(number)
        health = wait_for(port, 503)
        assert health.headers["retry-after"] == "1"
        assert httpx.get(f"http://127.0.0.1:{port}/health/live").status_code == 200
        refused = httpx.post(f"http://127.0.0.1:{port}/generate", json={"inputs": "Hi"})
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.json()["error_type"] == "shutting_down"
        events = [line for line in lines if line]
    assert json.loads(events[-1].removeprefix("data: "))["generated_text"] == "a" * 10
    assert process.wait(PATIENCE_SECONDS) == 0


def test_a_second_sigterm_ends_streams_by_an_event_that_says_so(start: Start, port: int) -> None:
    process = start()
    wait_for(port, 200)
    with httpx.stream("POST", f"http://127.0.0.1:{port}/generate_stream", json={"inputs": "Hi"}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data:")
        process.send_signal(signal.SIGTERM)
        wait_for(port, 503)
        process.send_signal(signal.SIGTERM)
        events = [json.loads(line.removeprefix("data:")) for line in lines if line]
    assert events[-1]["error_type"] == "shutting_down"
    assert "before this answer was whole" in events[-1]["error"]
    assert len(events) < 9
    assert process.wait(PATIENCE_SECONDS) == 0


def test_with_a_shutdown_delay_requests_are_taken_while_the_router_is_not_ready(start: Start, port: int) -> None:
    process = start("--shutdown-delay", "6")
    url = f"http://127.0.0.1:{port}"
    wait_for(port, 200)
    with httpx.Client(base_url=url) as client:
        assert "connection" not in client.post("/generate", json=HI).headers
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert wait_for(port, 503).headers["retry-after"] == "1"
        late = client.post("/generate", json=HI)  # on a connection that was open before
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        assert httpx.post(f"{url}/generate", json=HI).status_code == 200
        assert httpx.get(f"{url}/health/live").status_code == 200
        with client.stream("POST", "/generate_stream", json=HI) as response:
            lines = [line for line in response.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["generated_text"] == "a" * 10
    assert process.wait(PATIENCE_SECONDS) == 0
    assert time.monotonic() - began > 5.9


def test_a_second_sigterm_ends_the_shutdown_delay(start: Start, port: int) -> None:
    process = start("--shutdown-delay", "600")
    wait_for(port, 200)
    process.send_signal(signal.SIGTERM)
    wait_for(port, 503)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_before_the_shards_are_ready_there_is_no_shutdown_delay(start: Start, port: int) -> None:
    process = start("--shutdown-delay", "600", FAKE="hang")
    wait_for(port, 503)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_a4_a_child_of_the_router_would_inherit_neither_its_port_nor_the_launchers_pipe(
    start: Start, port: int
) -> None:
    read_end, write_end = os.pipe()
    with socket.create_server(("127.0.0.1", port)) as listener:
        passed = (listener.fileno(), write_end)
        process = start("--listen-fd", str(passed[0]), "--ready-fd", str(write_end), pass_fds=passed)
        wait_for(port, 200)
        files = {}
        for path in Path(f"/proc/{process.pid}/fdinfo").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                files[path.name] = path.read_text()
    flags = {name: int(text.partition("flags:")[2].split()[0], 8) for name, text in files.items()}
    inherited = {name for name, value in flags.items() if not value & os.O_CLOEXEC}
    assert inherited <= {"0", "1", "2"}, inherited
    os.close(write_end)
    os.close(read_end)


@pytest.mark.parametrize(
    ("flags", "is_local"),
    [
        pytest.param((), True, id="loopback without a key"),
        pytest.param(("--hostname", "localhost"), True, id="localhost"),
        pytest.param(("--hostname", "0.0.0.0"), False, id="every address"),
        pytest.param(("--api-key", "sesame"), False, id="a key"),
        pytest.param(("--hostname", "0.0.0.0", "--listen-fd"), True, id="a descriptor on loopback"),
    ],
)
def test_a5_browsers_are_kept_out_where_only_this_machine_is_let_in(
    flags: tuple[str, ...], is_local: bool, start: Start, port: int
) -> None:
    with ExitStack() as stack:
        passed: tuple[int, ...] = ()
        if "--listen-fd" in flags:
            passed = (stack.enter_context(socket.create_server(("127.0.0.1", port))).fileno(),)
        start(*flags, *map(str, passed), pass_fds=passed)
        wait_for(port, 200)
        foreign = {"host": f"evil.example:{port}", "origin": "http://evil.example"}
        answer = httpx.get(f"http://127.0.0.1:{port}/health", headers=foreign)
        assert answer.status_code == (403 if is_local else 200)
        assert answer.headers.get("access-control-allow-origin") == (None if is_local else "*")
        for host in ("localhost", f"127.0.0.1:{port}"):
            assert httpx.get(f"http://127.0.0.1:{port}/health", headers={"host": host}).status_code == 200


def test_one_router_takes_over_from_another_and_no_request_fails(start: Start, port: int) -> None:
    """What is under way ends where it began, and so does what comes on a connection that was open."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        flags = ("--listen-fd", str(listener.fileno()))
        old = start(*flags, pass_fds=(listener.fileno(),))
        url = f"http://127.0.0.1:{port}"
        wait_for(port, 200)
        read_end, write_end = os.pipe()
        fresh = start(*flags, "--ready-fd", str(write_end), pass_fds=(listener.fileno(), write_end))
        os.close(write_end)
        # By default the client itself closes a connection after five idle seconds, in which the other may still start.
        limits = httpx.Limits(keepalive_expiry=None)
        with (
            httpx.Client(base_url=url, limits=limits) as kept,
            httpx.stream("POST", f"{url}/generate_stream", json=HI) as response,
        ):
            assert kept.get("/health").status_code == 200
            lines = response.iter_lines()
            assert next(lines).startswith("data:")
            assert os.read(read_end, 1), "the other one takes connections"
            os.close(read_end)
            old.send_signal(signal.SIGUSR1)
            answers = [httpx.post(f"{url}/generate", json=HI) for _ in range(2)]
            last = kept.post("/generate", json=HI)
            assert [answer.status_code for answer in (*answers, last)] == [200] * 3
            assert last.headers["connection"] == "close"
            events = [line for line in lines if line]
        assert json.loads(events[-1].removeprefix("data: "))["generated_text"] == "a" * 10
        assert old.wait(PATIENCE_SECONDS) == 0
        assert httpx.get(f"{url}/health").status_code == 200
        fresh.send_signal(signal.SIGTERM)
        assert fresh.wait(PATIENCE_SECONDS) == 0


def test_a_router_that_hands_over_can_still_be_stopped(start: Start, port: int) -> None:
    process = start()
    wait_for(port, 200)
    with httpx.stream("POST", f"http://127.0.0.1:{port}/generate_stream", json=HI) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        events = [line for line in lines if line]
    assert json.loads(events[-1].removeprefix("data: "))["generated_text"] == "a" * 10
    assert process.wait(PATIENCE_SECONDS) == 0


def test_a_router_that_cannot_start_takes_no_connection(start: Start, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        read_end, write_end = os.pipe()
        flags = ("--listen-fd", str(listener.fileno()), "--ready-fd", str(write_end))
        process = start(*flags, pass_fds=(listener.fileno(), write_end), FAKE="fail")
        os.close(write_end)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 1
        assert errors.splitlines()[-1] == "error: no shard answers"
        assert os.read(read_end, 1) == b""
        os.close(read_end)


def test_the_first_router_answers_before_it_tells_that_the_shards_are_ready(start: Start, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        read_end, write_end = os.pipe()
        flags = ("--listen-fd", str(listener.fileno()), "--ready-fd", str(write_end), "--accepts-early")
        passed = (listener.fileno(), write_end)
        process = start(*flags, pass_fds=passed, FAKE="hang")
        wait_for(port, 503)
        assert not select.select([read_end], [], [], 0.1)[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
        start(*flags, pass_fds=passed)
        os.close(write_end)
        assert os.read(read_end, 1) == b"\n"
        assert wait_for(port, 200)
        os.close(read_end)


def test_without_its_parent_it_stops(model: Path, port: int) -> None:
    code = "import os, subprocess, sys, time; "
    code += f"subprocess.Popen([sys.executable, {str(SCRIPT)!r}, '--exit-with-parent', str(os.getpid())])"
    environment = {
        "PYTHONPATH": ":".join(entry for entry in sys.path if entry),
        "TOKENIZER_NAME": str(model),
        "HOSTNAME": "127.0.0.1",
        "PORT": str(port),
    }
    parent = subprocess.Popen([sys.executable, "-c", code + "; time.sleep(60)"], env=environment)
    wait_for(port, 200)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
        except httpx.TransportError:
            return
        time.sleep(0.05)
    raise AssertionError("the router outlived its parent")


def test_print_schema(start: Start) -> None:
    process = start("print-schema")
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "/v1/chat/completions" in json.loads(output)["paths"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_an_address_of_version_6() -> None:
    with bind("::1", 0) as listener:
        assert listener.family is socket.AF_INET6


def test_only_main_modules_read_the_environment() -> None:
    """Settings come from flags and variables through typer, nowhere else; sandbox processes get a few variables."""
    folder = Path(__file__).parent.parent / "funitel"
    readers = [
        path for path in folder.rglob("*.py") if "os.environ" in path.read_text() or "getenv" in path.read_text()
    ]
    assert readers == [folder / "router" / "sandbox" / "process.py"]
