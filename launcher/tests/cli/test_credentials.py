"""A key reaches no server but the one for which it was given: two servers, 127.0.0.1 and 127.0.0.2 as another host."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from funitel.launcher.bench.http import Endpoint
from funitel.launcher.bench.settings import BenchSettings
from funitel.launcher.cli.server import _environ
from funitel.launcher.terminal_ui.credentials import credential_for
from funitel.launcher.terminal_ui.http_client import Api
from funitel.proto.errors import FunitelError, SettingsError
from funitel.proto.settings.variables import GivenBy
from funitel_testing.fake_api import FakeApi, serving

SENT = "Bearer sesame"


@pytest.fixture
def servers() -> Iterator[tuple[FakeApi, FakeApi]]:
    with ExitStack() as stack:
        yield (
            stack.enter_context(serving(FakeApi(key="sesame"))),
            stack.enter_context(serving(FakeApi(key="sesame"), "127.0.0.2")),
        )


def run(*argv: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    variables = {"PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": "/nowhere"} | environ
    return subprocess.run([sys.executable, "-m", "funitel", *argv], capture_output=True, text=True, env=variables)


@pytest.mark.parametrize(
    ("variable", "named", "url", "is_sent"),
    [
        (None, "", "http://10.0.0.1:3000", True),
        ("API_KEY", "", "http://127.0.0.1:3000", True),
        ("API_KEY", "", "localhost:3000", True),
        ("API_KEY", "", "http://[::1]:3000", True),
        ("API_KEY", "", "http://10.0.0.1:3000", False),
        ("API_KEY", "http://10.0.0.1:3000", "http://10.0.0.1:3000", False),
        ("FUNITEL_API_KEY", "", "http://127.0.0.1:3000", True),
        ("FUNITEL_API_KEY", "", "https://10.0.0.1", False),
        ("FUNITEL_API_KEY", "https://A.example/v1", "https://a.example:443", True),
        ("FUNITEL_API_KEY", "http://b https://a.example", "https://a.example", True),
        ("FUNITEL_API_KEY", "https://a.example", "http://a.example", False),
        ("FUNITEL_API_KEY", "https://a.example", "https://a.example:8443", False),
        ("FUNITEL_API_KEY", "https://a.example", "https://a.example.evil.test", False),
        ("FUNITEL_API_KEY", "https://a.example", "https://a.example@evil.test", False),
        ("FUNITEL_API_KEY", "http://[", "http://10.0.0.1", False),
        ("FUNITEL_API_KEY", "", "http://127.0.0.1.evil.test", False),
        ("FUNITEL_API_KEY", "", "http://127.0.0.1@evil.test", False),
    ],
)
def test_which_server_gets_the_key(variable: str | None, named: str, url: str, is_sent: bool) -> None:
    key = "sesame" if variable is None else GivenBy.of("sesame", variable)
    found = credential_for(key, url, {"FUNITEL_URL": named})
    assert found.key == ("sesame" if is_sent else None)
    assert is_sent or (variable or "") in found.advice


def test_a_redirect_is_not_followed(servers: tuple[FakeApi, FakeApi]) -> None:
    ours, other = servers
    ours.redirects_to = other.url
    api = Api(ours.url, "sesame")
    with pytest.raises(FunitelError, match=rf"redirects to '{other.url}/info': give that as --url$"):
        api.get("/info")
    with pytest.raises(FunitelError, match="redirects to"):
        list(api.stream("/generate_stream", {}))
    assert asyncio.run(Endpoint(ours.url, "sesame").request("POST", "/generate", b"{}", 5)).status == 307
    assert (ours.keys, other.keys) == ([SENT] * 3, [])


def test_generate_sends_the_key_of_the_environment_to_this_machine_only(servers: tuple[FakeApi, FakeApi]) -> None:
    ours, other = servers
    proxied = {"http_proxy": other.url, "all_proxy": other.url}
    assert run("generate", "Hi", "--url", ours.url, API_KEY="sesame", **proxied).stdout == "Hello there\n"
    refused = run("generate", "Hi", "--url", other.url, API_KEY="sesame", FUNITEL_URL=ours.url)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.endswith("missing or wrong API key: API_KEY is for servers of this machine: give --api-key\n")
    refused = run("generate", "Hi", "--url", other.url, FUNITEL_API_KEY="sesame", FUNITEL_URL=ours.url)
    assert "FUNITEL_API_KEY is for the server that FUNITEL_URL names: set that, or give --api-key" in refused.stderr
    assert set(ours.keys) == {SENT}
    assert set(other.keys) == {None}
    other.keys.clear()
    for argv, environ in (
        (("--url", other.url, "--api-key", "sesame"), {"API_KEY": "another"}),
        ((), {"FUNITEL_URL": other.url, "FUNITEL_API_KEY": "sesame"}),
    ):
        assert run("generate", "Hi", *argv, **environ).stdout == "Hello there\n"
    assert set(other.keys) == {SENT}


def test_top_and_bench_keep_the_key_too(servers: tuple[FakeApi, FakeApi]) -> None:
    _, other = servers
    for command in (("top", "--once"), ("bench", "--num-requests", "1")):
        done = run(*command, "--url", other.url, API_KEY="sesame")
        assert done.returncode == 1
        assert "API_KEY is for servers of this machine: give --api-key" in done.stderr
    assert set(other.keys) == {None}


def test_bench_takes_a_key_for_each_host() -> None:
    urls = ("http://127.0.0.1:1", "http://127.0.0.2:1")
    with pytest.raises(SettingsError, match="--api-key must be given once for each of 2 --url, given 1 times"):
        BenchSettings(url=urls, api_key=("a",))
    each = BenchSettings(url=urls, api_key=("a", "b"))
    assert (each.api_key_of(0), each.api_key_of(1)) == ("a", "b")
    shared = BenchSettings(url=urls, api_key=(GivenBy.of("a", "FUNITEL_API_KEY"),))
    assert (shared.api_key_of(0), shared.api_key_of(1)) == ("a", "a"), "of which each server gets what is for it"


def test_a_temporary_server_requires_the_clients_key_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {name: value for name, value in os.environ.items() if "API_KEY" not in name}
    others = ("API_KEY", "FUNITEL_API_KEY", "FUNITEL_API_KEY_FILE", "FUNITEL_TLS_CERT", "TLS_CLIENT_CA", "API_KEY_FILE")
    for name in (*others, "FUNITEL_CONFIG", "FUNITEL_ADDRESS_FILE"):
        monkeypatch.setenv(name, "another")
    assert _environ("sesame") == rest | {"FUNITEL_API_KEY": "sesame"}
    assert _environ(None) == rest
