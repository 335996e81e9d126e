"""Keys at work: who is found, what is left, what a changed file changes."""

import hashlib
import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from funitel.proto.errors import Forbidden, RateLimited, SettingsError
from funitel.proto.security.keys import Key, digest_of, keys_of, line_of, read_keys
from funitel.router.auth.accounts import Account, Accounts, owner_of
from funitel.router.telemetry.metrics import Metrics

KEY = Key(name="team-a", digest=digest_of(b"sesame"))
NOW = 1000.0


def account(**bounds: object) -> Account:
    return Account(replace(KEY, **bounds), Metrics())  # type: ignore[arg-type]


def written(path: Path, *keys: Key) -> Path:
    path.write_text("".join(f"{line_of(key)}\n" for key in keys))
    return path


def enter(one: Account, now: float = NOW) -> None:
    with one.entered(now):
        pass


# Who


def test_a_key_is_found_by_what_it_is_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", KEY)
    accounts = Accounts("first", str(path), Metrics())
    found = accounts.find((b"sesame", b""))
    assert found is not None
    assert found.key.name == "team-a"
    assert accounts.find((b"", b"first")) is not None
    for token in (b"", b"Sesame", b"sesame ", b"sesam", KEY.digest, KEY.digest.hex().encode(), b"x" * 10**6):
        assert accounts.find((token, b"")) is None
    assert accounts.find((b"wrong", b"sesame")) is found


@pytest.mark.parametrize(
    ("bounds", "is_let_in"),
    [
        ({}, True),
        ({"expires": datetime.now(UTC) + timedelta(hours=1)}, True),
        ({"expires": datetime.now(UTC) - timedelta(seconds=2)}, False),
        ({"revoked": datetime.now(UTC) - timedelta(seconds=2)}, False),
    ],
)
def test_a_key_that_has_ended_lets_nobody_in(bounds: dict[str, datetime], is_let_in: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "keys", replace(KEY, **bounds))  # type: ignore[arg-type]
    found = Accounts(None, str(path), Metrics()).find((b"sesame",))
    assert (found is not None) == is_let_in


def test_a_key_is_valid_until_it_expires() -> None:
    ending = account(expires=datetime.fromtimestamp(NOW, UTC))
    assert [ending.is_valid(instant) for instant in (NOW - 1, NOW, NOW + 1)] == [True, False, False]


def test_an_owner_is_a_salted_hash_of_the_key() -> None:
    assert account().owner == owner_of(KEY.digest) != owner_of(b"other")
    assert len(owner_of(b"")) == 16
    assert owner_of(b"") != hashlib.blake2b(b"", digest_size=16).digest()


def test_without_keys_nobody_is_asked() -> None:
    assert not Accounts(None, None, Metrics()).is_asked_for
    assert Accounts("", None, Metrics()).is_asked_for
    assert Accounts("", None, Metrics()).find((b"",)) is None


# Cached prefixes


def test_a2_cached_prefixes_belong_to_a_group_or_to_a_key_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def owners() -> list[bytes]:
        return [key.cache_owner for key in keys_of("first", str(path))]

    other = replace(KEY, digest=digest_of(b"other"))
    lines = [line_of(KEY), line_of(replace(other, name="team-b")), "bare", "naked"]
    path.write_text("\n".join(lines))
    before = owners()
    assert len({*before}) == 5
    assert {len(owner) for owner in before} == {32}
    path.write_text(
        "\n".join([line_of(other), line_of(replace(KEY, name="team-b", expires=datetime.now(UTC))), "naked"])
    )
    assert owners() == [before[0], before[1], before[2], before[4]], "neither a new hash nor another line matters"

    grouped = [replace(KEY, group="g"), replace(other, name="team-b", group="g"), replace(other, name="g")]
    path.write_text("\n".join(map(line_of, grouped)))
    _, first, second, named = owners()
    assert first == second != named
    assert first not in before


def test_a2_a_group_counts_as_soon_as_the_file_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", KEY)
    accounts = Accounts(None, str(path), Metrics())
    found = accounts.find((b"sesame",))
    assert found is not None
    alone = found.key.cache_owner
    written(path, replace(KEY, group="g", name="renamed"))
    os.utime(path, (1, 1))
    accounts.refresh()
    assert found.key.cache_owner not in (alone, replace(KEY, name="renamed").cache_owner)


@pytest.mark.parametrize(("group", "why"), [('"a b"', "`group` must match"), ("7", "`group` must match"), ("null", "")])
def test_a2_a_group_is_named_as_a_key_is(group: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(line_of(KEY)[:-1] + f', "group": {group}}}')
    if why:
        with pytest.raises(SettingsError, match=why):
            read_keys(str(path))
    else:
        assert read_keys(str(path)) == [KEY]


# What for


def test_scopes_name_what_the_key_is_for() -> None:
    one = account(routes=("/v1/*", "/generate"), models=("my-llama", "adapter"))
    one.check_route("/v1/completions")
    one.check_model("my-llama")
    with pytest.raises(Forbidden, match=r"for the routes /v1/\*, /generate\. Given: /tokenize"):
        one.check_route("/tokenize")
    with pytest.raises(Forbidden, match=r"for the models my-llama, adapter\. Given: 'other'"):
        one.check_model("other")


# How much


def test_requests_within_a_minute() -> None:
    one = account(requests_per_minute=2)
    enter(one)
    enter(one, NOW + 30)
    with pytest.raises(RateLimited, match="at most 2 requests a minute") as caught:
        enter(one, NOW + 40)
    assert caught.value.wait_seconds == 21.0
    with pytest.raises(RateLimited):
        enter(one, NOW + 60.9)
    enter(one, NOW + 61)
    with pytest.raises(RateLimited):
        enter(one, NOW + 62)


def test_requests_at_once() -> None:
    one = account(max_concurrent_requests=1)
    with one.entered(NOW), pytest.raises(RateLimited, match="at most 1 requests of this API key run at once"):
        enter(one)
    with pytest.raises(KeyError), one.entered(NOW):
        raise KeyError
    enter(one)


def test_a_refused_request_uses_nothing_up() -> None:
    one = account(requests_per_minute=1, max_concurrent_requests=1)
    with one.entered(NOW):
        for _ in range(5):
            with pytest.raises(RateLimited):
                enter(one)
    enter(one, NOW + 61)


def test_tokens_are_set_aside_and_settled_at_what_was_used() -> None:
    one = account(tokens_per_minute=100)
    one.reserve(60, NOW)
    with pytest.raises(RateLimited, match="0 are used, requests that run may take 60, this one 41"):
        one.reserve(41, NOW)
    one.reserve(40, NOW)
    with pytest.raises(RateLimited, match="requests that run may take 100, this one 1"):
        one.reserve(1, NOW)
    one.settle(60, 5, 5, NOW + 1)
    one.settle(40, 10, 10, NOW + 2)
    one.reserve(70, NOW + 3)
    one.settle(70, 0, 70, NOW + 4)
    with pytest.raises(RateLimited) as caught:
        one.reserve(20, NOW + 5)
    assert caught.value.wait_seconds == pytest.approx(1001 + 61 - 1005 + 1)  # both of the first two must be forgotten
    with pytest.raises(RateLimited):
        enter(one, NOW + 5)
    enter(one, NOW + 63)


def test_a_request_may_enter_while_one_token_is_left() -> None:
    one = account(tokens_per_minute=100)
    one.settle(0, 9, 90, NOW)
    enter(one)
    one.settle(0, 1, 0, NOW)
    with pytest.raises(RateLimited):
        enter(one)


def test_more_than_a_whole_minute_runs_alone() -> None:
    one = account(tokens_per_minute=100)
    one.reserve(1, NOW)
    with pytest.raises(RateLimited):
        one.reserve(500, NOW)
    one.settle(1, 0, 0, NOW)
    one.reserve(500, NOW)
    with pytest.raises(RateLimited):
        enter(one)
    one.settle(500, 100, 50, NOW + 1)
    with pytest.raises(RateLimited):
        enter(one, NOW + 61)
    enter(one, NOW + 62)


def test_what_becomes_of_a_key_is_counted_by_its_name_and_shown_nowhere_else() -> None:
    metrics = Metrics()
    one = Account(replace(KEY, requests_per_minute=1, routes=("/x",)), metrics)
    enter(one)
    with pytest.raises(RateLimited):
        enter(one)
    with pytest.raises(Forbidden):
        one.check_route("/y")
    one.reserve(10, NOW)
    one.settle(10, 3, 4, NOW)
    text = metrics.exposition().decode()
    for sample in (
        'funitel_key_requests_total{key="team-a"} 1.0',
        'funitel_key_refused_total{key="team-a",reason="requests"} 1.0',
        'funitel_key_refused_total{key="team-a",reason="route"} 1.0',
        'funitel_key_tokens_total{key="team-a",kind="prompt"} 3.0',
        'funitel_key_tokens_total{key="team-a",kind="completion"} 4.0',
    ):
        assert sample in text
    assert "sesame" not in text
    assert KEY.digest.hex() not in text


# Files that change


def test_a_changed_file_is_read_again_and_what_was_used_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = written(tmp_path / "keys", replace(KEY, requests_per_minute=5))
    accounts = Accounts(None, str(path), Metrics())
    one = accounts.find((b"sesame",))
    assert one is not None
    enter(one)
    accounts.refresh()
    assert not caplog.messages
    other = Key(name="b", digest=digest_of(b"open"))
    written(path, replace(KEY, requests_per_minute=1), other)
    accounts.refresh()
    assert caplog.messages == ["API keys read again: 2"]
    assert accounts.find((b"open",)) is not None
    assert accounts.find((b"sesame",)) is one
    with pytest.raises(RateLimited):
        enter(one, NOW + 1)
    written(path, replace(KEY, revoked=datetime.now(UTC)))
    accounts.refresh()
    assert accounts.find((b"sesame",)) is None
    assert accounts.find((b"open",)) is None


@pytest.mark.parametrize("content", ["", "{}", "\xff", None])
def test_a_broken_file_changes_nothing_but_the_log(
    content: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "keys", KEY)
    accounts = Accounts(None, str(path), Metrics())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode("latin-1"))
    accounts.refresh()
    accounts.refresh()
    [line] = caplog.messages
    assert line.startswith(f"the API keys stay as they were: --api-key-file {path}")
    assert accounts.find((b"sesame",)) is not None
    written(path, replace(KEY, name="again"))
    accounts.refresh()
    found = accounts.find((b"sesame",))
    assert found is not None
    assert found.key.name == "again"


def test_a_file_that_is_replaced_is_seen_whatever_its_time_and_size(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", KEY)
    accounts = Accounts(None, str(path), Metrics())
    before = path.stat()
    new = written(tmp_path / "new", replace(KEY, digest=digest_of(b"simsim")))
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(new, path)
    accounts.refresh()
    assert accounts.find((b"simsim",)) is not None


def test_a_file_that_is_none_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        Accounts(None, str(tmp_path / "absent"), Metrics())


def test_a_check_costs_microseconds(tmp_path: Path) -> None:
    keys = [Key(name=f"k{number}", digest=digest_of(b"%d" % number)) for number in range(1000)]
    path = written(tmp_path / "keys", replace(KEY, requests_per_minute=10**9, tokens_per_minute=10**9), *keys)
    accounts = Accounts(None, str(path), Metrics())
    began = time.process_time()
    for number in range(2000):
        found = accounts.find((b"sesame", b""))
        assert found is not None
        found.check_route("/generate")
        with found.entered(NOW + number / 100):
            pass
    assert (time.process_time() - began) / 2000 < 100e-6
