"""Variables of the environment: their names, those that other software sets, and those of a former name."""

import os
import sys
from dataclasses import dataclass

import pytest
import typer

from funitel.proto.errors import SettingsError
from funitel.proto.settings.command import SettingsCommand
from funitel.proto.settings.fields import as_command, check_bounds, run_app, setting
from funitel.proto.settings.variables import disregarded, variable_of_value
from funitel.router.settings import RouterSettings, opens_port

OWN_NAME = "my-pod-7"


@dataclass(frozen=True, kw_only=True)
class Example:
    """Settings of a server."""

    hostname: str | None = setting(None, "TGI has it.")
    port: int = setting(3000, "TGI has it.")
    api_key: str | None = setting(None, "TGI has it.", keeps_variable=True)
    num_threads: int | None = setting(None, "Ours.")
    api_key_file: str | None = setting(None, "Ours.")
    url: str | None = setting(None, "Ours, with this name from the beginning.", env="FUNITEL_URL")


def parse(*argv: str) -> Example:
    found: list[Example] = []
    app = typer.Typer(add_completion=False)
    app.command(cls=SettingsCommand)(as_command(Example, found.append, program="router"))
    app(list(argv), standalone_mode=False)
    return found[0]


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.MonkeyPatch:
    """Nothing of the test's own environment is read."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setattr("socket.gethostname", lambda: OWN_NAME)
    caplog.set_level("INFO")
    return monkeypatch


def test_ours_count_before_tgis_and_tgi_lacks_some(environ: pytest.MonkeyPatch) -> None:
    for name, value in (("PORT", "1"), ("FUNITEL_PORT", "2"), ("FUNITEL_NUM_THREADS", "4")):
        environ.setenv(name, value)
    assert (parse().port, parse().num_threads) == (2, 4)
    environ.setenv("FUNITEL_PORT", "")
    assert parse().port == 1, "an empty variable counts as unset"
    assert parse("--port", "3").port == 3


def test_the_log_names_the_shared_variables_that_count(
    environ: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("API_KEY", "PORT", "FUNITEL_NUM_THREADS"):
        environ.setenv(name, "7")
    parse("--port", "1")
    assert caplog.messages == ["settings from the environment: API_KEY"]


def test_a_former_name_is_one_warning_with_the_new_one(
    environ: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ.setenv("NUM_THREADS", "many")
    assert parse().num_threads is None
    assert caplog.messages == ["NUM_THREADS is not read: the variable of --num-threads is FUNITEL_NUM_THREADS"]
    environ.setenv("FUNITEL_NUM_THREADS", "2")
    caplog.clear()
    assert (parse().num_threads, caplog.messages) == (2, [])
    assert parse("--num-threads", "3").num_threads == 3
    assert caplog.messages == []


def test_a_former_name_that_kept_clients_out_is_refused(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("API_KEY_FILE", "/keys")
    with pytest.raises(SettingsError, match="^API_KEY_FILE is not read: .* is FUNITEL_API_KEY_FILE$"):
        parse()
    assert parse("--api-key-file", "/other").api_key_file == "/other"


def test_a_name_that_never_was_a_variable_is_none_of_ours(
    environ: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ.setenv("URL", "http://evil.test")
    assert (parse().url, caplog.messages) == (None, [])


@pytest.mark.parametrize("name", ["PORT", "FUNITEL_PORT"])
def test_a_service_link_of_kubernetes_is_no_port(
    name: str, environ: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ.setenv(name, "tcp://10.0.0.1:80")
    assert parse().port == 3000
    (line,) = caplog.messages
    assert line == f"{name}=tcp://10.0.0.1:80 is not used: it is what Kubernetes sets for a Service of that name"
    assert os.environ[name] == "tcp://10.0.0.1:80"


@pytest.mark.parametrize(("value", "address"), [(OWN_NAME, None), ("::", "::"), ("localhost", "localhost")])
def test_the_own_name_is_no_address(
    value: str, address: str | None, environ: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ.setenv("HOSTNAME", value)
    assert parse().hostname == address
    assert not [line for line in caplog.messages if "not used" in line]


def test_another_name_opens_no_address(environ: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    environ.setenv("HOSTNAME", "dev.example.org")
    assert parse().hostname is None
    assert caplog.messages == [
        "HOSTNAME=dev.example.org is not used: it is no address; --hostname gives the address to listen on"
    ]
    assert disregarded({"FUNITEL_HOSTNAME": "dev.example.org"}) == {}


def test_a_wrong_value_names_the_variable_it_came_from(
    environ: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer(add_completion=False)
    app.command(cls=SettingsCommand)(as_command(Example, check_bounds))
    environ.setattr(sys, "argv", ["example"])
    for name in ("PORT", "FUNITEL_PORT"):
        environ.setenv(name, "many")
        with pytest.raises(SystemExit):
            run_app(app)
        assert capsys.readouterr().err == (
            f"error: Invalid value for '--port' (env var: '{name}'): 'many' is not a valid integer\n"
        )


@pytest.mark.parametrize(
    ("argv", "variables", "opens"),
    [
        ([], {}, False),
        ([], {"API_KEY": "sesame"}, False),
        ([], {"FUNITEL_API_KEY": "sesame"}, True),
        (["--api-key", "sesame"], {}, True),
        (["--api-key", "sesame"], {"API_KEY": "sesame"}, True),
        ([], {"API_KEY": "sesame", "FUNITEL_TLS_CLIENT_CA": "ca.pem"}, True),
    ],
)
def test_only_a_key_for_this_server_opens_its_port(
    argv: list[str], variables: dict[str, str], opens: bool, environ: pytest.MonkeyPatch
) -> None:
    for name, value in (variables | {"FUNITEL_TLS_CERT": "a.pem", "FUNITEL_TLS_KEY": "a.key"}).items():
        environ.setenv(name, value)
    found: list[RouterSettings] = []
    app = typer.Typer(add_completion=False)
    app.command(cls=SettingsCommand)(as_command(RouterSettings, found.append, program="router"))
    app(argv, standalone_mode=False)
    assert opens_port(found[0]) is opens
    expected = "sesame" if argv or "API_KEY" in " ".join(variables) else None
    assert found[0].api_key == expected
    assert variable_of_value(found[0].api_key) == (None if argv or not expected else next(iter(variables)))
