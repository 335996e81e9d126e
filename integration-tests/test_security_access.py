"""Attacks on who is let in, each as it was found in servers of this kind, against a router as it runs."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from funitel_testing.certificates import Authority, Files
from funitel_testing.servers import free_port, listens, wait_until

KEY = "funitel-sesame"
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module", autouse=True)
def router(port: int, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """A router with a key and no shards: what passes the key is answered with 503, and nothing else is."""
    folder = tmp_path_factory.mktemp("router")
    flags = ["--port", str(port), "--hostname", HOST, "--tokenizer-name", str(tiny_model)]
    flags += ["--master-shard-uds-path", str(folder / "absent"), "--protect-all-routes"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "funitel.router", *flags],
            env={**os.environ, "API_KEY": KEY},
            stdout=log,
            stderr=log,
        )
        try:
            wait_until(lambda: listens(port), 60, "listens")
            wait_until(lambda: status(port, "POST /generate", f"Authorization: Bearer {KEY}") == 503, 60, "answers")
            yield process
        finally:
            process.kill()
            process.wait()


def status(port: int, target: str, *headers: str, body: str = '{"inputs": "hi"}') -> int:
    """Send a request as it is written here, with nothing made tidy on the way; the status of the answer."""
    lines = [f"{target} HTTP/1.1", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    if not any(header.lower().startswith("host:") for header in headers):
        lines.append("Host: localhost")
    if not any(header.lower().startswith("connection:") for header in headers):
        lines.append("Connection: close")
    with socket.create_connection((HOST, port), timeout=10) as connection:
        connection.sendall("\r\n".join([*lines, "", body]).encode())
        answer = connection.recv(65536).decode()
    return int(answer.split()[1])


def test_the_right_key_passes_and_no_other(port: int) -> None:
    assert status(port, "POST /generate", f"Authorization: Bearer {KEY}") == 503
    assert status(port, "POST /v1/messages", f"x-api-key: {KEY}") in (422, 400, 503)
    for wrong in ("", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY.upper()}", f"Bearer {KEY}x", "Bearer *"):
        assert status(port, "POST /generate", f"Authorization: {wrong}") == 401


@pytest.mark.parametrize(
    "target",
    [
        "/generate",
        "//generate",
        "/generate/",
        "/./generate",
        "/v1/../generate",
        "/health/../generate",
        "/health/..%2fgenerate",
        "/%67enerate",
        "/%2567enerate",
        "/generate%00",
        "/generate;/health",
        "/generate?/health",
        "/generate#/health",
        "/generate%3f/health",
        "/GENERATE",
        "/health%2f..%2fgenerate",
        "/v1//chat/completions",
        "/v1/chat/completions/",
        "http://here/generate",
        "http://here/health/../generate",
        "http://elsewhere:1/generate",
        "/v1/models/../chat/completions",
        "/docs/../metrics",
        "/metrics",
        "/\\generate",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "post", "GENERATE"])
def test_no_way_to_write_a_path_leads_past_the_key(port: int, method: str, target: str) -> None:
    """CVE-2026-48746: the path that is checked is the path that is routed."""
    assert status(port, f"{method} {target}") in (400, 401, 404, 405)


@pytest.mark.parametrize(
    "header",
    [
        "Host: here/?",
        "Host: here/health?",
        "Host: x/health#",
        "Host: health",
        "Host: ",
        "X-Forwarded-Prefix: /health",
        "X-Original-URL: /health",
        "X-Rewrite-URL: /health",
        "X-Forwarded-Host: here/health?",
        "X-Forwarded-For: 127.0.0.1",
        "Forwarded: for=127.0.0.1;host=here/health",
        "X-HTTP-Method-Override: GET",
        "Root-Path: /generate",
    ],
)
def test_no_header_leads_past_the_key(port: int, header: str) -> None:
    """CVE-2026-48746: a Host header is no part of the path; nor is what proxies write."""
    for target in ("POST /generate", "POST /v1/chat/completions", "GET /metrics"):
        assert status(port, target, header) in (400, 401)


def test_no_upgrade_leads_past_the_key(port: int) -> None:
    websocket = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: YQ==")
    assert status(port, "GET /metrics", *websocket) == 401
    assert status(port, "GET /generate", *websocket) == 405
    http2 = ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__")
    assert status(port, "POST /generate", *http2) == 401


def test_a_preflight_tells_nothing_and_does_nothing(port: int) -> None:
    asks = ("Origin: http://page", "Access-Control-Request-Method: POST")
    assert status(port, "OPTIONS /generate", *asks) == 200
    assert status(port, "OPTIONS /generate") == 405
    assert status(port, "POST /generate", "Origin: http://page") == 401


def test_a_second_request_on_a_connection_is_checked_too(port: int) -> None:
    first = f"POST /generate HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 2\r\n\r\n{{}}"
    second = "POST /generate HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    with socket.create_connection((HOST, port), timeout=10) as connection:
        connection.sendall((first + second).encode())
        answers = b""
        while piece := connection.recv(65536):
            answers += piece
    assert answers.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 401 " in answers


def test_a_body_is_not_read_for_nobody(port: int) -> None:
    """Without a key a request costs no more than its head: it is refused before its body has come."""
    head = "POST /generate HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 1000000000\r\n\r\n"
    with socket.create_connection((HOST, port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert b" 401 " in connection.recv(65536)


def test_nothing_listens_that_was_not_asked_for(router: subprocess.Popen[bytes], port: int) -> None:
    """CVE-2026-3059 and kin: no broker, no debugger, no port but the one."""
    own = {os.readlink(entry) for entry in Path(f"/proc/{router.pid}/fd").iterdir()}
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                listening.add(int(words[1].rpartition(":")[2], 16))
    assert listening == {port}


def test_a_shard_on_tcp_wants_a_certificate(tiny_model: Path, tmp_path: Path) -> None:
    """CVE-2025-30165, CVE-2025-32444 and kin: what runs the model is reached by those who prove who they are."""
    authority = Authority(tmp_path)
    own, known = authority.sign("shard"), authority.sign("router", "router.invalid")
    address, http = f"localhost:{free_port()}", free_port()

    def tls(files: Files) -> list[str]:
        return ["--shard-tls-cert", files.cert, "--shard-tls-key", files.key, "--shard-tls-ca", authority.ca]

    log = tmp_path / "log"
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb"))

        def start(*words: str) -> "subprocess.Popen[bytes]":
            process = subprocess.Popen([sys.executable, "-m", *words], stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        shard = ["serve", str(tiny_model), "--device", "cpu", "--dtype", "float32", "--num-threads", "1"]
        start("funitel.model_server", *shard, "--listen", address, *tls(own))
        router = ["--tokenizer-name", str(tiny_model), "--hostname", HOST, "--master-shard-address", address]
        start("funitel.router", *router, "--port", str(http), *tls(known))
        wait_until(lambda: listens(http) and status(http, "GET /health") == 200, 90, "a router that is known")
        plain = start("funitel.router", *router, "--port", str(free_port()), "--shard-connect-timeout", "1")
        assert plain.wait(60) == 1
        assert status(http, "GET /health") == 200
    assert f"no shard answers at tcp://{address}" in log.read_text().splitlines()[-1]
