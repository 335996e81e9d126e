"""The address of the port: loopback by default."""

import pytest

from funitel.proto.errors import SettingsError
from funitel.proto.settings.listen_address import is_local_by_default, is_loopback, listen_address

OWN_NAME = "my-pod-7"


@pytest.fixture(autouse=True)
def name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: OWN_NAME)


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize(
    ("hostname", "address"),
    [("0.0.0.0", "0.0.0.0"), ("::", "::"), ("::1", "::1"), ("10.0.0.1", "10.0.0.1"), ("localhost", "127.0.0.1")],
)
def test_an_address_that_is_given_is_taken(
    hostname: str, address: str, is_guarded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert listen_address(hostname, "192.0.2.1", is_guarded=is_guarded) == address
    assert not caplog.records


def test_a_name_that_somebody_gave_is_every_address_as_with_tgi(caplog: pytest.LogCaptureFixture) -> None:
    assert listen_address("another-pod", None, is_guarded=False) == "0.0.0.0"
    assert caplog.messages == ["--hostname another-pod is not an address: listening on 0.0.0.0"]


@pytest.mark.parametrize("hostname", [None, OWN_NAME])
@pytest.mark.parametrize(
    ("usual", "is_guarded", "address"),
    [
        (None, False, "127.0.0.1"),
        (None, True, "0.0.0.0"),
        ("0.0.0.0", False, "0.0.0.0"),
        ("192.0.2.1", True, "192.0.2.1"),
    ],
)
def test_where_nobody_chose_it_is_loopback_unless_a_key_is_needed_or_the_installation_chose(
    hostname: str | None, usual: str | None, is_guarded: bool, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert listen_address(hostname, usual, is_guarded=is_guarded) == address
    assert is_local_by_default(hostname, usual, is_guarded=is_guarded) == (address == "127.0.0.1")
    assert not caplog.records


def test_an_address_that_was_given_is_no_default() -> None:
    assert not is_local_by_default("127.0.0.1", None, is_guarded=False)


def test_what_an_installation_chooses_is_an_address() -> None:
    with pytest.raises(SettingsError, match="--default-hostname must be like 0.0.0.0, given 'every'"):
        listen_address(None, "every", is_guarded=True)


@pytest.mark.parametrize(
    ("host", "is_own"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True), ("[::1]", True)]
    + [("0.0.0.0", False), ("10.0.0.1", False), ("[::]", False), ("gpu-1", False), ("", False)],
)
def test_loopback_is_told_from_the_rest(host: str, is_own: bool) -> None:
    assert is_loopback(host) == is_own
