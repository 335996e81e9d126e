"""Find the server for a client: the given one, the one on the default port, or a temporary one that is started."""

import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from funitel.launcher.cli.settings import ClientSettings
from funitel.launcher.config.sockets import free_port
from funitel.launcher.terminal_ui.http_client import LOCAL_URL, Api, context_of
from funitel.launcher.terminal_ui.terminal import Status, one_line
from funitel.proto.errors import FunitelError, NotReady, StartupError
from funitel.proto.extras import check_extra
from funitel.proto.process.python import module_command
from funitel.proto.settings.variables import PROTECTIVE

POLL_SECONDS = 0.2
STOP_SECONDS = 120.0  # longer than the launcher's grace period for its children
LAST_LINES = 20  # of its output, for the reason of its end

# Of another server: its access control, the file of its settings, and the file in which it is found.
_NOT_INHERITED = (
    *("FUNITEL_API_KEY", "API_KEY", "FUNITEL_API_KEY_FILE", "FUNITEL_PROTECT_ALL_ROUTES", *PROTECTIVE),
    *("FUNITEL_TLS_CERT", "FUNITEL_TLS_KEY", "FUNITEL_TLS_CLIENT_CA"),
    *("FUNITEL_TLS_PROBE_CERT", "FUNITEL_TLS_PROBE_KEY", "FUNITEL_CONFIG", "FUNITEL_ADDRESS_FILE"),
)

# The process that wrote a line which the launcher forwards.
_LINE_PREFIX = re.compile(r"^(?:shard \d+|router) \| ")


@contextmanager
def connected(settings: ClientSettings) -> Iterator[Api]:
    """A server that answers.

    Raises:
        FunitelError: none answers, it serves another model, or none could be started.
    """
    if settings.url is not None:
        api = Api(settings.url, settings.api_key, context_of(settings))
        _check_model(api, _wait_info(api), settings.model_id)
        yield api
    elif (api := Api(LOCAL_URL, settings.api_key)) and _serves(api, settings.model_id):
        yield api
    else:
        with _started(settings) as api:
            yield api


def model_of(api: Api) -> str:
    """The name of the model a server serves, in one line."""
    return one_line(str(api.get("/info").get("model_id")))


def _wait_info(api: Api) -> Any:
    """The answer of /info; waits while the server is starting."""
    with Status() as status:
        while True:
            try:
                return api.get("/info")
            except NotReady as error:
                if "starting" not in error.message:
                    raise
                status.show(f"{api.url}: {error.message}")
                time.sleep(POLL_SECONDS)


def _check_model(api: Api, info: Any, model_id: str | None) -> None:
    served = info.get("model_id") if isinstance(info, dict) else None
    if served is None:
        raise FunitelError(f"{api.url} is not a funitel server: its /info names no model")
    if model_id is not None and served != model_id:
        raise FunitelError(f"{api.url} serves {one_line(str(served))}, not {model_id}")


def _serves(api: Api, model_id: str | None) -> bool:
    """Whether a funitel server answers and serves the model asked for."""
    try:
        _check_model(api, _wait_info(api), model_id)
    except FunitelError:
        return False
    return True


@contextmanager
def _started(settings: ClientSettings) -> Iterator[Api]:
    """A temporary launcher on a free local port; it is stopped at the end."""
    check_extra("server", "a server of its own, as none runs,")
    server = _Launcher(settings)
    try:
        yield server.ready()
    finally:
        server.stop()


def _environ(api_key: str | None) -> dict[str, str]:
    """The environment of a temporary server: this one's without what is another server's, and with the client's key."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return inherited | ({} if api_key is None else {"FUNITEL_API_KEY": str(api_key)})


class _Launcher:
    """A launcher in its own session, so that Ctrl-C reaches only the client; it ends with the client process."""

    def __init__(self, settings: ClientSettings) -> None:
        port = free_port()
        self._name = settings.model_id or "the model"
        self._api = Api(f"http://127.0.0.1:{port}", settings.api_key)
        self._lines: deque[str] = deque([f"starting a server for {self._name}"], LAST_LINES)
        self._unshown = deque(self._lines, LAST_LINES)
        words = ["--hostname", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
        words += [] if settings.model_id is None else ["--model-id", settings.model_id]
        self._process = subprocess.Popen(
            [*module_command("funitel.launcher.hosted"), str(os.getpid()), *words],
            env=_environ(settings.api_key),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="server-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Read its output until it ends; a full pipe would block it."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = _LINE_PREFIX.sub("", line.decode("utf-8", "replace").strip())
            if text:
                self._lines.append(text)
                self._unshown.append(text)

    def ready(self) -> Api:
        """Wait until it answers, showing its log lines.

        Raises:
            StartupError: it has ended; the message has its reason.
        """
        with Status() as status:
            while not self._answers():
                if self._process.poll() is not None:
                    self._reader.join(timeout=1)
                    raise StartupError(self._reason())
                self._show(status)
                time.sleep(POLL_SECONDS)
            self._show(status)
        return self._api

    def _show(self, status: Status) -> None:
        """Show every line since the last call: a small model loads between two calls."""
        while self._unshown:
            status.show(self._unshown.popleft())

    def _answers(self) -> bool:
        try:
            self._api.get("/info")
        except NotReady:
            return False
        return True

    def _reason(self) -> str:
        errors = [line.removeprefix("error: ") for line in self._lines if line.startswith("error: ")]
        return errors[-1] if errors else f"the server ended with {self._process.returncode}: {self._lines[-1]}"

    def stop(self) -> None:
        """Stop it by SIGTERM, then by SIGKILL."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()
        assert self._process.stderr is not None
        self._reader.join(timeout=1)
        self._process.stderr.close()
