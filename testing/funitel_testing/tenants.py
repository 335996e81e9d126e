"""A real server with users, and what its control socket and its sessions answer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from funitel_testing.fleet import Fleet
from funitel_testing.servers import PLAIN

PASSWORD = "correct horse battery"
CSRF = "x-funitel-csrf"
SECONDS = 60.0


class Plane:
    """The control socket of a server, and the sessions of its users."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.url = fleet.url

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask by the control socket, as an admin."""
        transport = httpx.HTTPTransport(uds=str(self.socket))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=SECONDS) as client:
            answer = client.request(method, path, json=body)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    @property
    def socket(self) -> Path:
        """The control socket."""
        (line,) = [
            line
            for line in Path(f"/proc/{self.fleet.router_pid()}/cmdline").read_bytes().split(b"\0")
            if b"control.sock" in line
        ]
        return Path(os.fsdecode(line))

    def user(self, name: str, role: str = "user", **limits: Any) -> None:
        """Add a user."""
        self.ask("POST", "/v1/users", {"name": name, "role": role, "password": PASSWORD, "limits": limits})

    def key(self, user: str, name: str = "k", **fields: Any) -> tuple[int, str]:
        """Make a key; returns its id and its text."""
        made = self.ask("POST", "/v1/keys", {"user": user, "name": name, **fields})
        return made["id"], made["key"]

    @contextmanager
    def session(self, name: str) -> Iterator[httpx.Client]:
        """A client that is logged in, as a browser is."""
        with httpx.Client(base_url=self.url, verify=PLAIN, timeout=SECONDS) as client:
            answer = client.post("/v1/auth/login", json={"name": name, "password": PASSWORD})
            assert answer.status_code == 200, answer.text
            client.headers[CSRF] = answer.json()["csrf_token"]
            yield client


@contextmanager
def users_fleet(folder: Path, model: Path, name: str, *flags: str) -> Iterator[Plane]:
    """A server with `--users`, one model and the admin `root`; its log has no traceback at the end."""
    offline = {"HF_HUB_OFFLINE": "1"}  # a hub that does not answer is tried for seconds
    with Fleet(folder, "--hostname", "127.0.0.1", "--users", *flags, environ=offline) as fleet:
        plane = Plane(fleet)
        plane.ask(
            "POST", "/v1/models", {"model": str(model), "name": name, "settings": {"max_batch_total_tokens": 32768}}
        )
        plane.user("root", "admin")
        yield plane
        log = fleet.log.read_text(errors="replace")
        assert "Traceback" not in log, log[max(0, log.index("Traceback") - 500) :][:4000]
