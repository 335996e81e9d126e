"""The link to the tenants: a stream of states, one a line, that may break, stall or be nonsense."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fake_unix_server import FakeUnixServer, chunk_of, head_of, question
from fakes import eventually
from tenant_states import SECRET, key, state, user

from funitel.proto.errors import Forbidden, NotReady, SettingsError
from funitel.proto.security.keys import digest_of
from funitel.proto.security.quota import Settlement
from funitel.proto.security.sessions import SessionSigner
from funitel.router.auth.accounts import Account
from funitel.router.fleet.control import ControlSocket
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.tenants import charges as charges_module
from funitel.router.tenants import link as module
from funitel.router.tenants.link import TAKEN, WATCH, TenantLink, accounts_of

WALL = 1_800_000_000.0
PATIENCE_SECONDS = 10.0


class Plane(FakeUnixServer):
    """A control plane that streams what a test sends, and takes charges.

    Attributes:
        first: what each stream begins with; None for nothing.
        status: of the streams.
        asked: method and target of each question.
        charged: bodies of charges.
        taken: what the link says that it has taken.
        num_streams: those that have begun.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path=path)
        self.first: bytes | None = None
        self.status = 200
        self.asked: list[str] = []
        self.charged: list[dict[str, Any]] = []
        self.taken: list[dict[str, Any]] = []
        self.num_streams = 0
        self._streams: list[asyncio.StreamWriter] = []

    def say(self, content: dict[str, Any]) -> None:
        self.first = json.dumps(content).encode() + b"\n"
        self.send(self.first)

    def send(self, data: bytes) -> None:
        """Send bytes to each stream, as one chunk."""
        for writer in self._streams:
            writer.write(chunk_of(data))

    def end_streams(self) -> None:
        """End the streams as a control plane that closes does."""
        for writer in self._streams:
            writer.write(b"0\r\n\r\n")
        self._streams.clear()

    def cut_streams(self) -> None:
        """End the connections of streams as a control plane that is killed does."""
        for writer in self._streams:
            writer.transport.abort()
        self._streams.clear()

    async def stop(self) -> None:
        await super().stop()
        self._streams.clear()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, target, body = await question(reader)
        if target != TAKEN:
            self.asked.append(f"{method} {target}")
        if target == TAKEN:
            self.taken.append(json.loads(body))
            writer.write(head_of(204, 0))
            await writer.drain()
            return
        if method == "POST":
            self.charged.append(json.loads(body))
            content = json.dumps({"refusals": [None] * len(self.charged[-1]["reservations"])}).encode()
            writer.write(head_of(200, len(content)) + content)
            await writer.drain()
            return
        writer.write(head_of(self.status))
        self._streams.append(writer)
        self.num_streams += 1
        if self.first is not None:
            writer.write(chunk_of(self.first))
        await reader.read()


@pytest.fixture
async def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plane]:
    monkeypatch.setattr(module, "RECONNECT_SECONDS", 0.02)
    monkeypatch.setattr(charges_module, "USAGE_SECONDS", 0.02)
    monkeypatch.setattr(charges_module, "RETRY_SECONDS", 0.02)
    plane = Plane(tmp_path / "control.sock")
    await plane.start()
    yield plane
    await plane.stop()


@asynccontextmanager
async def linked(plane: Plane) -> AsyncIterator[TenantLink]:
    """A link that runs as long as the block lasts, and must not end by itself."""
    link = TenantLink(ControlSocket(str(plane.path)), Metrics())
    running = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield link
        assert not running.done(), "the link has ended"
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, BaseExceptionGroup):
            await running


def find(link: TenantLink, text: str = "sesame") -> Account | None:
    return link.directory.find(digest_of(text.encode()), WALL)


async def known(link: TenantLink, *texts: str) -> None:
    async def are_known() -> bool:
        return all(find(link, text) is not None for text in texts)

    await eventually(are_known, f"known: {texts}")


async def gone(link: TenantLink, text: str) -> None:
    async def is_gone() -> bool:
        return find(link, text) is None

    await eventually(is_gone, f"gone: {text}")


async def streams(plane: Plane, count: int) -> None:
    async def are_there() -> bool:
        return plane.num_streams >= count

    await eventually(are_there, f"{count} streams, there were {plane.num_streams}")


# A stream that works


async def test_the_directory_follows_each_state_of_the_stream(plane: Plane) -> None:
    plane.say(state(key()))
    async with linked(plane) as link:
        await known(link, "sesame")
        plane.say(state(key(), key(2, "second")))
        await known(link, "sesame", "second")
        plane.say(state(key(2, "second")))
        await gone(link, "sesame")
        assert find(link, "second") is not None
        plane.say(state(key(2, "second", is_banned=True)))

        async def is_banned() -> bool:
            try:
                return find(link, "second") is None
            except Forbidden:
                return True

        await eventually(is_banned, "banned")
    assert plane.asked == [f"GET {WATCH}"]


async def test_tenants_are_not_known_before_the_first_line(plane: Plane) -> None:
    async with linked(plane) as link:
        await streams(plane, 1)
        plane.send(b"\n")
        await asyncio.sleep(0.05)
        with pytest.raises(NotReady):
            link.directory.check_known()
        plane.say(state())

        async def is_known() -> bool:
            with suppress(NotReady):
                link.directory.check_known()
                return True
            return False

        await eventually(is_known, "known")


async def test_sessions_end_and_generations_rise_by_the_stream(plane: Plane) -> None:
    signer = SessionSigner(SECRET)
    first, second = signer.new("ann", 0), signer.new("ann", 0)
    session = signer.session(first)
    assert session is not None
    plane.say(state(key()))
    async with linked(plane) as link:
        await known(link, "sesame")
        assert link.directory.session(first) is not None
        plane.say(state(key(), key(2, "a"), ended_sessions=[session.id]))
        await known(link, "a")
        assert link.directory.session(first) is None
        assert link.directory.session(second) is not None
        plane.say(state(key(), key(3, "b"), users=[user(generation=1)]))
        await known(link, "b")
        assert link.directory.session(second) is None


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_a_line_may_come_in_pieces_and_several_lines_in_one(plane: Plane, size: int) -> None:
    async with linked(plane) as link:
        await streams(plane, 1)
        lines = b"".join(json.dumps(state(key(1, f"text {number}"))).encode() + b"\n" for number in range(3))
        for begin in range(0, len(lines), size):
            plane.send(lines[begin : begin + size])
        await known(link, "text 2")
        assert find(link, "text 0") is None


async def test_a_state_of_thousands_of_keys_is_taken(plane: Plane) -> None:
    plane.say(state(*(key(number, f"text {number}") for number in range(3000))))
    async with linked(plane) as link:
        await known(link, "text 0", "text 2999")


# A stream that is lost


@pytest.mark.parametrize("end", ["end_streams", "cut_streams"])
async def test_the_last_state_stays_while_the_stream_is_lost_and_is_followed_again(plane: Plane, end: str) -> None:
    plane.say(state(key()))
    async with linked(plane) as link:
        await known(link, "sesame")
        account = find(link)
        plane.first = None
        getattr(plane, end)()
        await streams(plane, 2)
        assert find(link) is account
        link.directory.check_known()
        plane.say(state(key(2, "new")))
        await known(link, "new")
        assert find(link) is None


async def test_the_last_state_stays_while_the_control_plane_is_gone_and_what_was_used_too(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    plane.say(state(key()))
    async with linked(plane) as link:
        await known(link, "sesame")
        account = find(link)
        await plane.stop()
        await asyncio.sleep(0.2)
        assert find(link) is account
        await plane.start()
        plane.say(state(key(), key(2, "new")))
        await known(link, "new")
        assert find(link) is account
    told = [message for message in caplog.messages if message.startswith("users and keys stay as they are")]
    assert len(told) == 1, "one line for each loss, not one for each try"


async def test_each_loss_is_told_once(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    plane.say(state(key()))
    async with linked(plane) as link:
        await known(link, "sesame")
        for number in range(3):
            plane.first = None
            plane.cut_streams()
            await streams(plane, number + 2)
            plane.say(state(key(), key(2, f"text {number}")))
            await known(link, f"text {number}")
    assert len([line for line in caplog.messages if line.startswith("users and keys stay as they are")]) == 3


async def test_a_loss_after_a_clean_end_of_the_stream_is_told(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    """A control plane that closes ends its streams properly; that it does not come back must be in the log too."""
    plane.say(state(key()))
    async with linked(plane) as link:
        await known(link, "sesame")
        plane.end_streams()
        await asyncio.sleep(0)
        await plane.stop()
        await asyncio.sleep(0.3)
    assert any(line.startswith("users and keys stay as they are") for line in caplog.messages)


async def test_a_control_plane_that_comes_later_is_found(plane: Plane) -> None:
    await plane.stop()
    async with linked(plane) as link:
        await asyncio.sleep(0.1)
        plane.say(state(key()))
        await plane.start()
        await known(link, "sesame")


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_a_refusal_is_asked_again_and_is_no_state(plane: Plane, status: int) -> None:
    plane.say(state(key()))
    plane.status = status
    async with linked(plane) as link:
        await streams(plane, 3)
        assert find(link) is None
        with pytest.raises(NotReady):
            link.directory.check_known()
        plane.status = 200
        await known(link, "sesame")


async def test_half_a_line_at_the_end_of_a_stream_is_left_out(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    plane.say(state(key()))
    async with linked(plane) as link:
        await known(link, "sesame")
        plane.first = None
        plane.send(json.dumps(state()).encode()[:40])
        await asyncio.sleep(0.02)
        plane.cut_streams()
        await streams(plane, 2)
        plane.say(state(key(), key(2, "new")))
        await known(link, "sesame", "new")
    assert not any("no state of tenants" in line for line in caplog.messages)


async def test_a_state_is_said_to_be_taken_once_it_holds(plane: Plane) -> None:
    plane.say(state(key(), watcher=3, version=7))
    async with linked(plane) as link:

        async def is_told() -> bool:
            assert bool(plane.taken) <= (find(link) is not None)
            return bool(plane.taken)

        await eventually(is_told, "taken")
        plane.send(b"no state\n")
        plane.say(state(watcher=3, version=9))
        await gone(link, "sesame")

        async def both() -> bool:
            return len(plane.taken) == 2

        await eventually(both, "taken")
    assert plane.taken == [{"watcher": 3, "version": 7}, {"watcher": 3, "version": 9}]


# Lines that are no state


MALFORMED: list[bytes] = [
    b"no JSON",
    b"{",
    b"null",
    b"[]",
    b"{}",
    b"17",
    b'"text"',
    b"\xff\xfe",
    b"\0",
    b"[" * 100_000,
    json.dumps(state() | {"keys": None}).encode(),
    json.dumps(state() | {"users": [{"name": "ann"}]}).encode(),
    json.dumps(state() | {"users": [{"name": "ann", "role": "god", "limits": {}, "generation": 0}]}).encode(),
    json.dumps(state() | {"ended_sessions": 5}).encode(),
]


@pytest.mark.parametrize("line", MALFORMED, ids=range(len(MALFORMED)))
async def test_a_malformed_line_is_logged_and_changes_nothing(
    plane: Plane, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    plane.say(state(key()))
    async with linked(plane) as link:
        await known(link, "sesame")
        plane.send(line + b"\n")

        async def is_told() -> bool:
            return any("no state of tenants" in message for message in caplog.messages)

        await eventually(is_told, "told")
        assert find(link) is not None
        plane.say(state(key(), key(2, "new")))
        await known(link, "sesame", "new")
    assert plane.num_streams == 1
    assert SECRET not in caplog.text
    assert digest_of(b"sesame").hex() not in caplog.text


UNUSABLE: list[dict[str, Any]] = [
    {"id": "one"},
    {"limits": {"requests_per_minute": "many"}},
    {"models": ["\ud800"]},
    {"digest": "no hexadecimal digits"},
    {"digest": "abc"},
    {"expires": 1e300},
    {"expires": -1e300},
    {"expires": 1e15},
]


@pytest.mark.parametrize("fields", UNUSABLE, ids=str)
async def test_a_line_with_a_value_that_cannot_be_used_does_not_end_the_link(
    plane: Plane, fields: dict[str, Any]
) -> None:
    plane.say(state(key()))
    async with linked(plane) as link:
        await known(link, "sesame")
        plane.say(state(key(), key(2, "bad", **fields)))
        await asyncio.sleep(0.05)
        assert find(link) is not None
        plane.say(state(key(2, "bad", **fields), key(4, "other")))
        await known(link, "other")
        assert find(link) is None, "a key that is none keeps no change of others away"
        plane.say(state(key(), key(3, "new")))
        await known(link, "sesame", "new")
        link.charges.settle(used("a"), is_reserved=True)

        async def is_charged() -> bool:
            return bool(plane.charged)

        await eventually(is_charged, "charged")


# Charges


def used(id: str) -> Settlement:
    tokens = {"prompt_tokens": 1, "completion_tokens": 2}
    return Settlement(id=id, at=1.5, user="ann", key=1, model="m", requests=1, cost=0.0, **tokens)


async def test_charges_go_on_while_the_stream_is_lost(plane: Plane) -> None:
    plane.status = 503
    async with linked(plane) as link:
        link.charges.settle(used("a"), is_reserved=False)

        async def is_charged() -> bool:
            return bool(plane.charged)

        await eventually(is_charged, "charged")
    assert [each["id"] for batch in plane.charged for each in batch["settlements"]] == ["a"]


async def test_charges_wait_for_a_control_plane_that_is_gone_and_keep_their_number(plane: Plane) -> None:
    await plane.stop()
    async with linked(plane) as link:
        link.charges.settle(used("a"), is_reserved=True)
        await asyncio.sleep(0.1)
        link.charges.settle(used("b"), is_reserved=True)
        await plane.start()

        async def are_charged() -> bool:
            return len(plane.charged) == 2

        await eventually(are_charged, "charged")
    assert [(batch["number"], batch["settlements"][0]["id"]) for batch in plane.charged] == [(1, "a"), (2, "b")]


async def test_the_end_sends_what_was_used_last(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charges_module, "USAGE_SECONDS", 60.0)
    async with linked(plane) as link:
        link.charges.settle(used("a"), is_reserved=False)
        await asyncio.sleep(0.02)
    assert not plane.charged
    await link.close()
    assert [each["id"] for each in plane.charged[0]["settlements"]] == ["a"]


# Settings


def test_users_need_a_control_socket() -> None:
    with pytest.raises(SettingsError, match="--users needs --control-socket"):
        accounts_of(RouterSettings(users=True), Metrics(), None)


def test_a_server_without_users_has_no_link_and_asks_for_no_key(tmp_path: Path) -> None:
    control = ControlSocket(str(tmp_path / "none"))
    for given in (None, control):
        accounts, link = accounts_of(RouterSettings(), Metrics(), given)
        assert link is None
        assert accounts.tenants is None
        assert not accounts.is_asked_for


def test_a_server_with_users_asks_for_keys_from_the_first_request_on(tmp_path: Path) -> None:
    control = ControlSocket(str(tmp_path / "none"))
    accounts, link = accounts_of(RouterSettings(users=True, api_key="first"), Metrics(), control)
    assert link is not None
    assert accounts.tenants is link.directory
    assert accounts.is_asked_for
    assert accounts.find((b"first",)) is not None
    with pytest.raises(NotReady):
        accounts.find((b"second",))
