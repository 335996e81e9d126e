"""The health check of a container: it finds the server by the file of --address-file, whatever its flags are."""

import http.server
import json
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.config.resolve import resolve
from funitel.launcher.health_check import main
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.address_file import address_file
from funitel_testing.certificates import Authority

Launch = Callable[..., Any]


@contextmanager
def answering(status: int, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """The port of a server that answers every GET with `status`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def written(folder: Path, **address: str) -> str:
    path = folder / "address"
    path.write_text(json.dumps(address))
    return str(path)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_status_of_the_server_decides(tmp_path: Path, capsys: Any, status: int, code: int) -> None:
    with answering(status) as port:
        assert main([written(tmp_path, url=f"http://127.0.0.1:{port}")]) == code
    assert capsys.readouterr().out == f"http://127.0.0.1:{port}/health answers {status}\n"


def test_a_server_that_asks_for_a_certificate_is_given_the_launchers(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, client = authority.sign("server"), authority.sign("client")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(server.cert, server.key)
    context.verify_mode = ssl.CERT_REQUIRED
    with answering(200, context) as port:
        assert main([written(tmp_path, url=f"https://127.0.0.1:{port}", cert=client.cert, key=client.key)]) == 0


@pytest.mark.parametrize("content", [None, "", "[]", '{"url": "http://127.0.0.1:1"}', '{"url": "ftp://"}', '{"a": 1}'])
def test_anything_else_is_unhealthy_in_one_line(tmp_path: Path, capsys: Any, content: str | None) -> None:
    path = tmp_path / "address"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.count("\n") == 1


def test_it_imports_the_standard_library_alone() -> None:
    code = "import sys, funitel.launcher.health_check; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-X", "utf8", "-c", code], capture_output=True, text=True, check=True)
    assert not {"typer", "pydantic", "grpc", "numpy"} & set(done.stdout.split())


def test_the_file_is_there_while_the_server_serves(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "address"
    launched = launch("--address-file", str(path), "--hostname", "0.0.0.0").until_ready()
    assert json.loads(path.read_text()) == {"url": f"http://127.0.0.1:{launched.port}"}
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    assert not path.exists()


def test_a_second_server_leaves_the_file_to_the_first(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "address"
    first = launch("--address-file", str(path)).until_ready()
    second = launch("--address-file", str(path)).until_ready()
    assert f"--address-file {path} is not written: another server keeps it" in second.stderr
    second.send(signal.SIGTERM)
    assert second.wait() == 0
    assert json.loads(path.read_text()) == {"url": f"http://127.0.0.1:{first.port}"}
    first.send(signal.SIGTERM)
    assert first.wait() == 0
    assert [each.name for each in tmp_path.iterdir()] == []


def test_the_file_follows_the_settings_of_an_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "address"
    settings = LauncherSettings(address_file=str(path), device="cpu", num_shard=1)
    before = resolve(settings, 1, str(tmp_path / "uds"), ())
    with address_file(before) as write:
        assert json.loads(path.read_text())["url"].startswith("http://")
        write(replace(before, tls_cert="c", tls_key="k"))
        assert json.loads(path.read_text())["url"].startswith("https://")
    assert not path.exists()


def test_a_file_that_cannot_be_written_costs_a_warning(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "address"
    launched = launch("--address-file", str(path)).until_ready()
    assert f"--address-file {path} is not written: its folder cannot be written" in launched.stderr
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
