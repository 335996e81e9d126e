"""`funitel key`: what it prints, what it writes, what it refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from funitel.launcher.cli.keys import (
    GroupKeySettings,
    ListKeysSettings,
    NewKeySettings,
    RevokeKeySettings,
    list_all,
    make,
    regroup,
    revoke,
)
from funitel.proto.errors import SettingsError
from funitel.proto.security.keys import digest_of, read_keys


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "keys")


def new(path: str, capsys: pytest.CaptureFixture[str], name: str = "team-a", **bounds: object) -> str:
    """Make a key; the key."""
    make(NewKeySettings(api_key_file=path, name=name, **bounds))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    return printed.strip()


def test_a_key_is_printed_once_and_its_hash_is_kept(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(path).write_text("bare\n")
    text = new(path, capsys, routes=("/v1/*,/generate", "/tokenize"), models=("my-llama",), requests_per_minute=60)
    content = Path(path).read_text()
    assert text not in content
    assert content.startswith("bare\n")
    bare, key = read_keys(path)
    assert key.digest == digest_of(text.encode())
    assert (key.name, key.routes, key.models) == ("team-a", ("/v1/*", "/generate", "/tokenize"), ("my-llama",))
    assert (key.requests_per_minute, key.tokens_per_minute, key.expires) == (60, None, None)
    assert key.created is not None
    assert datetime.now(UTC) - key.created < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("given", "span"), [("90d", timedelta(days=90)), ("12h", timedelta(hours=12)), ("30m", timedelta(minutes=30))]
)
def test_a_key_may_end(path: str, capsys: pytest.CaptureFixture[str], given: str, span: timedelta) -> None:
    new(path, capsys, expires=given)
    [key] = read_keys(path)
    assert key.expires is not None
    assert abs(key.expires - datetime.now(UTC) - span) < timedelta(minutes=1)


def test_a_key_may_end_at_a_date(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    new(path, capsys, expires="2999-01-31")
    [key] = read_keys(path)
    assert key.expires == datetime(2999, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ({"name": "a b"}, "`name` must match"),
        ({"group": "a b"}, "`group` must match"),
        ({"expires": "soon"}, "`expires` must be like"),
        ({"expires": "0d"}, "--expires must be in the future, given 0d"),
        ({"expires": "2020-01-01"}, "--expires must be in the future"),
        ({"expires": "99999999999d"}, "`expires` must be at most 36500 days"),
        ({"expires": "-1d"}, "`expires` must be like"),
        ({"routes": ("v1",)}, "`routes` must be paths"),
        ({"models": ("a,,b",)}, "`models` must be names"),
        ({"tokens_per_minute": 0}, "`tokens_per_minute` must be an integer within 1..1000000000. Given: 0"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    path: str, capsys: pytest.CaptureFixture[str], bounds: dict[str, object], why: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        new(path, capsys, **bounds)  # type: ignore[arg-type]
    assert why in caught.value.message
    assert not Path(path).exists()
    assert capsys.readouterr().out == ""


def test_a_name_is_one_key_s_until_it_is_revoked(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    new(path, capsys)
    before = Path(path).read_text()
    with pytest.raises(SettingsError, match="has the same name"):
        new(path, capsys)
    assert Path(path).read_text() == before
    revoke(RevokeKeySettings(api_key_file=path, name="team-a"))
    new(path, capsys)
    old, young = read_keys(path)
    assert old.revoked is not None
    assert young.revoked is None


def test_what_is_not_there_cannot_be_revoked(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(path).write_text("bare\n")
    for name in ("nobody", "line-1", "bare"):
        with pytest.raises(SettingsError, match=f"has no key named '{name}' to revoke"):
            revoke(RevokeKeySettings(api_key_file=path, name=name))
    new(path, capsys)
    revoke(RevokeKeySettings(api_key_file=path, name="team-a"))
    with pytest.raises(SettingsError, match="no key named 'team-a'"):
        revoke(RevokeKeySettings(api_key_file=path, name="team-a"))


def test_a2_a_key_is_put_into_a_group_and_out_of_it(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    new(path, capsys, group="research", tokens_per_minute=5)
    [made] = read_keys(path)
    assert made.group == "research"
    list_all(ListKeysSettings(api_key_file=path))
    assert "group=research  tokens_per_minute=5" in capsys.readouterr().out
    for group in ("sales", None):
        regroup(GroupKeySettings(api_key_file=path, name="team-a", group=group))
        assert read_keys(path) == [replace(made, group=group)]
    before = Path(path).read_text()
    with pytest.raises(SettingsError, match="`group` must match"):
        regroup(GroupKeySettings(api_key_file=path, name="team-a", group="a b"))
    with pytest.raises(SettingsError, match="no key named 'b' to put into a group"):
        regroup(GroupKeySettings(api_key_file=path, name="b", group="g"))
    assert Path(path).read_text() == before


def test_the_list_says_what_each_may_do(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(path).write_text("bare\n")
    text = new(path, capsys, routes=("/v1/*",), expires="2999-01-31", tokens_per_minute=20_000)
    new(path, capsys, "b")
    revoke(RevokeKeySettings(api_key_file=path, name="b"))
    list_all(ListKeysSettings(api_key_file=path))
    bare, a, b = capsys.readouterr().out.splitlines()
    assert bare == "line-1  valid  routes=all  models=all"
    assert a == "team-a  valid until 2999-01-31T00:00:00Z  routes=/v1/*  models=all  tokens_per_minute=20000"
    assert b.startswith("b  revoked 20")
    assert text not in a


def test_the_commands_are_found_by_their_names(path: str) -> None:
    environ = {"PYTHONPATH": ":".join(filter(None, sys.path)), "FUNITEL_API_KEY_FILE": path, "PATH": "/bin"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "funitel.launcher", "key", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True)

    made = run("new", "--name", "a", "--routes", "/v1/*", "--routes", "/generate", "--max-concurrent-requests", "3")
    assert made.stdout.startswith("funitel-"), made.stderr
    record = json.loads(Path(path).read_text())
    assert (record["routes"], record["max_concurrent_requests"]) == (["/v1/*", "/generate"], 3)
    del environ["FUNITEL_API_KEY_FILE"]
    failed = run("list")
    assert failed.returncode == 1
    assert failed.stderr == "error: --api-key-file must name the file of keys\n"
