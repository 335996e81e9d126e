"""The preStop of shards: it returns once the server has ended, or the time is up."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from funitel.launcher.wait_for_drain import MAX_FAILURES, is_alive, main, wait


@contextmanager
def server(status: int = 200) -> Iterator[HTTPServer]:
    """A server that answers every GET with a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.mark.parametrize("status", [200, 503])
def test_a_server_that_answers_anything_is_alive(status: int) -> None:
    with server(status) as made:
        port = made.server_address[1]
        assert is_alive("127.0.0.1", port)
    assert not is_alive("127.0.0.1", port)
    assert not is_alive("no-such-host.invalid", port)


def test_one_failure_is_not_the_end() -> None:
    answers = iter([True, False, True, *[False] * MAX_FAILURES])
    assert wait(lambda: next(answers), 60, pause_seconds=0)
    assert not list(answers)


def test_it_ends_with_the_server() -> None:
    with server() as made:
        url = f"http://127.0.0.1:{made.server_address[1]}"
        command = [sys.executable, "-m", "funitel.launcher.wait_for_drain", url, "60"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(1.5)
        assert process.poll() is None
    assert process.communicate(timeout=30) == (f"{url} has ended\n", None)
    assert process.returncode == 0


def test_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as made:
        url = f"http://127.0.0.1:{made.server_address[1]}"
        assert main([url, "0.2"]) == 1
    assert capsys.readouterr().out == f"{url} answers after 0.2 seconds still\n"


@pytest.mark.parametrize(
    "words", [[], ["http://a:1"], ["a:1", "3"], ["https://a:1", "3"], ["http://a", "3"], ["http://a:x", "3"]]
)
def test_a_wrong_command_line_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == "error: give http://HOST:PORT of the server, and seconds\n"


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "soon"])
def test_seconds_are_a_number(seconds: str) -> None:
    assert main(["http://a:1", seconds]) == 2
