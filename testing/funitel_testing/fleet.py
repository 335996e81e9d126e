"""A real fleet for tests: `funitel up` with a state of its own, and what its REST answers."""

import shutil
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from funitel_testing.servers import PLAIN, Server, marked, wait_until

SECONDS = 180.0
STOP_SECONDS = 60.0


class Fleet(Server):
    """`funitel up` in a folder; everything it started is gone when the `with` ends.

    Attributes:
        state: the folder of its state.
    """

    def __init__(
        self, folder: Path, *flags: str, port: int | None = None, environ: dict[str, str] | None = None
    ) -> None:
        self.state = folder / "state"
        super().__init__(folder, *flags, "--state-dir", str(self.state), command=("up",), port=port, environ=environ)

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(timeout=STOP_SECONDS)
            wait_until(lambda: not marked(self.mark), STOP_SECONDS, f"left behind: {marked(self.mark)}")
        finally:
            self.kill_all()
            shutil.rmtree(self.state, ignore_errors=True)

    def kill_control_plane(self) -> None:
        """Kill -9 of the control plane alone: its router and its shards go on."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def start_control_plane(self) -> None:
        """Start a control plane with the same command, which takes over what still runs."""
        self.process = self._started()

    def launch(self, model: str, *, wait_ready: bool = True, **fields: Any) -> dict[str, Any]:
        """Launch a model; fails where the server refuses."""
        query = "" if wait_ready else "?wait_ready=false"
        return self.post(f"/v1/models{query}", {"model": model, **fields})

    def models(self) -> list[dict[str, Any]]:
        """Every model, with its state."""
        return list(self.get("/v1/models")["data"])

    def model(self, name: str) -> dict[str, Any]:
        """One model, with its state."""
        return self.get(f"/v1/models/{quote(name, safe='')}")

    def pids(self) -> dict[str, list[int]]:
        """Processes of the shards of each model that is loaded."""
        return {
            entry["name"]: sorted(pid for replica in entry["replicas"] for pid in replica["pids"])
            for entry in self.models()
            if entry["replicas"]
        }

    def get(self, path: str) -> dict[str, Any]:
        """The answer to a GET."""
        return self._answer(httpx.get(self.url + path, timeout=SECONDS, verify=PLAIN))

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a POST."""
        return self._answer(httpx.post(self.url + path, json=body or {}, timeout=SECONDS, verify=PLAIN))

    def delete(self, path: str) -> dict[str, Any]:
        """The answer to a DELETE."""
        return self._answer(httpx.delete(self.url + path, timeout=SECONDS, verify=PLAIN))

    def _answer(self, response: httpx.Response) -> dict[str, Any]:
        assert response.status_code < 300, f"{response.request.url}: {response.status_code} {response.text}"
        answer: dict[str, Any] = response.json()
        return answer

    def router_pid(self) -> int:
        """Process id of the router, whatever its parent is by now."""
        routers = [pid for pid in marked(self.mark) if b"funitel.router" in _words(pid)]
        assert len(routers) == 1, routers
        return routers[0]


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
