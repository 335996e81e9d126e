"""The file of keys: what it holds, what is wrong with it, how it is edited."""

import hashlib
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from funitel.proto.errors import SettingsError
from funitel.proto.security.keys import Key, covers, digest_of, editing, keys_of, line_of, new_key, parse, read_keys

DIGEST = "ab" * 32
WHOLE = Key(
    name="team-a",
    digest=bytes.fromhex(DIGEST),
    created=datetime(2026, 11, 21, 23, 0, 0, tzinfo=UTC),
    expires=datetime(2027, 2, 19, 23, 0, 0, tzinfo=UTC),
    routes=("/v1/*",),
    models=("my-llama", "mine/*"),
    group="research",
    requests_per_minute=60,
    tokens_per_minute=20_000,
    max_concurrent_requests=8,
)


def record(**fields: Any) -> str:
    return json.dumps({"name": "a", "sha256": DIGEST} | fields)


def test_a_key_is_256_bits_that_nobody_has_seen() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) == len("funitel-") + 43 for key in keys)
    assert digest_of(b"sesame") == hashlib.sha256(b"sesame").digest()


def test_a_line_reads_back_as_the_key_it_was_made_of() -> None:
    assert parse([line_of(WHOLE)], "f") == [WHOLE]
    plain = Key(name="b", digest=b"\0" * 32)
    assert parse([line_of(plain)], "f") == [plain]


def test_bare_keys_are_read_as_ever_and_are_for_everything(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"first\n\n  second \n{record()}\nsécret # with words\n")
    first, second, hashed, last = read_keys(str(path))
    assert first == Key(name="line-1", digest=digest_of(b"first"), is_bare=True)
    assert second == Key(name="line-3", digest=digest_of(b"second"), is_bare=True)
    assert hashed.name == "a"
    assert last.digest == digest_of("sécret # with words".encode())


def test_the_setting_is_a_key_beside_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n")
    assert [key.name for key in keys_of("sesame", str(path))] == ["api-key", "line-1"]
    assert keys_of(None, None) == []


def test_a_time_without_a_zone_is_utc() -> None:
    for text in ("2027-01-31", "2027-01-31T00:00:00", "2027-01-31T00:00:00Z", "2027-01-31T02:00:00+02:00"):
        [key] = parse([record(expires=text)], "f")
        assert key.expires == datetime(2027, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "must be a JSON object"),
        ("{" * 100_000, "must be a JSON object"),
        (record(route=["/v1/*"]), "unknown field 'route'"),
        (record(name=""), "`name` must match"),
        (record(name="a b"), "`name` must match"),
        (record(name=7), "`name` must match"),
        (record(sha256="ab"), "`sha256` must match"),
        (record(sha256=DIGEST.upper()), "`sha256` must match"),
        (json.dumps({"name": "a"}), "`sha256` must match"),
        (record(expires="soon"), "`expires` must be like 2027-01-31"),
        (record(expires=1), "`expires` must be a date and time"),
        (record(expires="0001-01-01T00:00:00+23:00"), "`expires` must be like"),
        (record(routes="/v1/*"), "`routes` must be an array"),
        (record(routes=["v1"]), "`routes` must be paths"),
        (record(routes=["/v1/*/x"]), "`routes` must be paths"),
        (record(routes=[""]), "`routes` must be paths"),
        (record(routes=[None]), "`routes` must be paths"),
        (record(models=["a*b"]), "`models` must be names"),
        (record(requests_per_minute=0), "`requests_per_minute` must be an integer within 1..1000000000"),
        (record(requests_per_minute=True), "`requests_per_minute` must be an integer"),
        (record(tokens_per_minute=1.5), "`tokens_per_minute` must be an integer"),
        (record(max_concurrent_requests=10**10), "`max_concurrent_requests` must be an integer"),
    ],
)
def test_a_line_that_is_wrong_is_named(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"first\n{line}\n")
    with pytest.raises(SettingsError) as caught:
        read_keys(str(path))
    assert caught.value.message.startswith(f"--api-key-file {path} line 2: ")
    assert why in caught.value.message


def test_two_valid_keys_do_not_share_a_name_but_a_revoked_one_may() -> None:
    revoked = record(revoked="2026-01-01")
    assert len(parse([revoked, record(sha256="cd" * 32), revoked], "f")) == 3
    with pytest.raises(SettingsError, match="line 3: the key of line 1 has the same name"):
        parse([record(), "bare", record(sha256="cd" * 32)], "f")


def test_a_file_that_is_no_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for content, why in (
        (b" \n\n", "must contain keys"),
        (b"\xff", "utf-8"),
        (b"x" * (9 << 20), "at most 8388608 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match=why):
            read_keys(str(path))
    with pytest.raises(SettingsError, match="No such file"):
        read_keys(str(tmp_path / "absent"))
    with pytest.raises(SettingsError, match="Is a directory"):
        read_keys(str(tmp_path))


def test_patterns() -> None:
    assert covers((), "/generate")
    assert covers(("/generate", "/v1/*"), "/v1/completions")
    assert covers(("*",), "/")
    assert not covers(("/v1/*",), "/v1")
    assert not covers(("/generate",), "/generate_stream")


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "keys", tmp_path / "link"
    with editing(str(path)) as lines:
        lines.append("first")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    before = path.stat().st_ino
    link.symlink_to(path)
    with editing(str(link)) as lines:
        lines.append("second")
    assert link.is_symlink()
    assert path.read_text() == "first\nsecond\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.stat().st_ino != before
    assert sorted(os.listdir(tmp_path)) == ["keys", "link"]


def test_an_edit_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n")

    def fail() -> None:
        with editing(str(path)) as lines:
            lines.clear()
            raise SettingsError("no")

    with pytest.raises(SettingsError):
        fail()
    assert path.read_text() == "first\n"
    with pytest.raises(SettingsError, match="cannot open the folder"), editing(str(tmp_path / "absent" / "keys")):
        pass


def test_edits_at_once_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def add(number: int) -> None:
        with editing(str(path)) as lines:
            lines.append(f"key-{number}")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.read_text().splitlines()) == sorted(f"key-{number}" for number in range(16))
