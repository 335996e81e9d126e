"""`funitel top`: show the models of a server, refreshed on a terminal, or printed as text or JSON."""

import json
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Group, RenderableType
from rich.live import Live

from funitel.launcher.cli.settings import TopSettings
from funitel.launcher.cli.top_page import State, line, page
from funitel.launcher.terminal_ui.http_client import LOCAL_URL, Api, context_of
from funitel.launcher.terminal_ui.terminal import console_of
from funitel.proto.errors import FunitelError, InvalidRequest, NotReady

PATH = "/v1/console/live"
QUERY = "?scheduler=true&since=1e18"  # no samples of the last hour
TICK_SECONDS = 0.1  # between two polls of keys and the window's size
QUIT = frozenset("qQ\x03\x04")


def top(settings: TopSettings) -> None:
    """Show a server until q or Ctrl-C; once with --once; line by line without a terminal.

    Raises:
        FunitelError: the server does not serve its state; or, with --once, it does not answer.
    """
    api = Api(settings.url or LOCAL_URL, settings.api_key, context_of(settings))
    if settings.once:
        _print(_state_of(api), api.url, is_json=settings.json)
    elif settings.json or not (console_of(sys.stdout).is_terminal and sys.stdin.isatty()):
        _print_repeatedly(api, settings)
    else:
        _watch(api, settings.interval)


def _state_of(api: Api) -> State:
    """The state of the server.

    Raises:
        NotReady: it does not answer.
        FunitelError: it does not serve its state.
    """
    try:
        state = api.get(PATH + QUERY)
    except InvalidRequest as error:
        raise FunitelError(f"{api.url} has no {PATH}, is it started with --console false? {error.message}") from None
    if not isinstance(state, dict):
        raise FunitelError(f"{api.url} gives an answer that funitel top cannot read")
    return state


def _print(state: State, url: str, *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(state), flush=True)
    else:
        console_of(sys.stdout).print(page(state, url))


def _print_repeatedly(api: Api, settings: TopSettings) -> None:
    while True:
        try:
            _print(_state_of(api), api.url, is_json=settings.json)
        except NotReady as error:
            print(f"not answering: {error.message}", file=sys.stderr, flush=True)
        time.sleep(settings.interval)


class _Poller:
    """Polls a server in a thread, so that a server that hangs does not block the keyboard."""

    def __init__(self, api: Api, interval: float) -> None:
        self.state: State | None = None  # the last received
        self.error: FunitelError | None = None  # of the last attempt
        self.num_answers = 0
        self._api = api
        self._interval = interval
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self.state = _state_of(self._api)
                self.error = None
            except FunitelError as error:
                self.error = error
            self.num_answers += 1
            time.sleep(self._interval)


def _watch(api: Api, interval: float) -> None:
    poller = _Poller(api, interval)
    console = console_of(sys.stdout)
    with suppress(KeyboardInterrupt), _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        drawn: object = None
        while not _is_quit_requested():
            if poller.state is None and poller.error is not None and not isinstance(poller.error, NotReady):
                break  # the server does not serve its state
            if (poller.num_answers, console.size) != drawn:
                drawn = poller.num_answers, console.size
                live.update(_page(poller, api.url), refresh=True)
    if poller.state is None and poller.error is not None:
        raise poller.error


def _page(poller: _Poller, url: str) -> RenderableType:
    """The last state, with a note if the server no longer answers."""
    state, error = poller.state, poller.error
    if state is None:
        return Group(
            line(url), line(""), line(f"not answering: {error.message}" if error is not None else "asking ...")
        )
    note = "" if error is None else f"NOT ANSWERING: {error.message}"
    return page(state, url, note)


@contextmanager
def _keys() -> Iterator[None]:
    """Read single keys, and restore the terminal at the end."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_quit_requested() -> bool:
    """Wait one tick for a key; return whether it quits."""
    if not select.select([sys.stdin], [], [], TICK_SECONDS)[0]:
        return False
    key = sys.stdin.read(1)
    return not key or key in QUIT
