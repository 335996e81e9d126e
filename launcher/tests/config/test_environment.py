"""What other software leaves in the environment of the launcher: it opens no port."""

import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

Launch = Callable[..., Any]
ONE = ("--num-shard", "1", "--device", "cpu")


def is_open(port: int) -> bool:
    """Whether the port is open on more than 127.0.0.1."""
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), 5):
        return True
    return False


@pytest.mark.parametrize(
    ("variables", "opens"),
    [
        ({"API_KEY": "sesame", "HOSTNAME": "dev.example.org", "PROMETHEUS_PORT": "tcp://10.0.0.1:9090"}, False),
        ({"FUNITEL_API_KEY": "sesame"}, True),
        ({"API_KEY": "sesame", "HOSTNAME": "0.0.0.0"}, True),
        ({"API_KEY": "sesame", "FUNITEL_DEFAULT_HOSTNAME": "0.0.0.0"}, True),
    ],
)
def test_a_stray_variable_opens_no_port(launch: Launch, variables: dict[str, str], opens: bool) -> None:
    launched = launch(*ONE, environ=variables).until_ready()
    launched.until("router ready")
    assert is_open(launched.port) is opens
    router = launched.entry("router start")["environ"]
    assert (router["FUNITEL_API_KEY"], "API_KEY" in router) == ("sesame", False), "requests need the key in any case"
    assert ("API_KEY, which other programs read too: listening on 127.0.0.1" in launched.stderr) is not opens
    if not opens:
        assert launched.stderr.count("settings from the environment: API_KEY") == 1
        assert "PROMETHEUS_PORT=tcp://10.0.0.1:9090 is not used: it is what Kubernetes sets" in launched.stderr
        assert "HOSTNAME=dev.example.org is not used" in launched.stderr
    assert "sesame" not in launched.stderr
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
