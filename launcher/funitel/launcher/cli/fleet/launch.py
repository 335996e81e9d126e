"""`funitel launch`: ask for a model, follow its launch, and ask whether to cancel it at Ctrl-C."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from funitel.launcher.cli.fleet.requests import MODELS, api_of, bytes_text, object_of, path_of
from funitel.launcher.cli.fleet.settings import LaunchSettings, LoadSettings
from funitel.launcher.terminal_ui.http_client import Api
from funitel.launcher.terminal_ui.terminal import console_of, one_line
from funitel.proto.errors import FunitelError, LaunchFailed, NotReady

POLL_SECONDS = 0.2
LOST_SECONDS = 30.0  # for which a server that restarts may not answer
INTERRUPTED = 130
_BODY = (
    *("model", "name", "replicas", "num_shard", "quantize", "dtype", "engine", "executor", "worker", "partition"),
    *("layers", "ttl", "request_limit", "priority", "retries"),
)
_ENDED = ("ready", "failed", "cancelled", "sleeping", "registered")


def launch(settings: LaunchSettings) -> None:
    """Launch a model.

    Raises:
        FunitelError: the server refuses, or the launch fails or is cancelled.
        SystemExit: 130 after Ctrl-C.
    """
    api = api_of(settings)
    body = {name: value for name in _BODY if (value := getattr(settings, name)) is not None}
    body |= {"pinned": True} if settings.pinned else {}
    body |= {"settings": settings.flags} if settings.flags else {}
    entry = object_of(api.send("POST", f"{MODELS}?wait_ready=false", body), api)
    name = str(entry.get("model_uid") or entry.get("name") or settings.name or settings.model)
    if settings.wait:
        entry = follow(api, name, is_quiet=settings.json)
    if settings.json:
        print(json.dumps(entry))
    elif settings.wait:
        print(f"{one_line(name)} is ready")
    else:
        print(f"{one_line(name)} is being launched: funitel list shows how far it is")


def load(settings: LoadSettings) -> None:
    """Load a model that the server knows; raises as `launch`."""
    api = api_of(settings)
    api.send("POST", f"{path_of(settings.name, 'load')}?wait_ready=false", {})
    follow(api, settings.name)
    print(f"{one_line(settings.name)} is ready")


def follow(api: Api, name: str, *, is_quiet: bool = False) -> dict[str, Any]:
    """Show a launch until it has ended, and return the model.

    Raises:
        LaunchFailed: it has failed, or was cancelled.
        FunitelError: the server no longer answers.
        SystemExit: 130 after Ctrl-C.
    """
    with _shown(is_quiet=is_quiet) as display:
        try:
            last = _until_ended(api, name, display)
        except KeyboardInterrupt:
            display.stop()
            _interrupted(api, name)
            sys.exit(INTERRUPTED)
    if last.get("stage") != "ready":
        reason = last.get("error") or f"it is {last.get('stage')}"
        raise LaunchFailed(f"{one_line(name)} is not ready: {one_line(str(reason))}")
    return object_of(api.get(path_of(name)), api)


def _until_ended(api: Api, name: str, display: "_Display") -> dict[str, Any]:
    """Poll; a server that does not answer for a moment may be restarting."""
    answered = time.monotonic()
    while True:
        try:
            state = object_of(api.get(path_of(name, "progress")), api)
            answered = time.monotonic()
        except NotReady:
            if time.monotonic() - answered > LOST_SECONDS:
                raise
        except FunitelError as error:
            if "no model" in error.message or "cancelled" in error.message:
                return {"stage": "cancelled", "error": "its launch was cancelled"}
            raise
        else:
            display.show(state)
            if state.get("stage") in _ENDED:
                return state
        time.sleep(POLL_SECONDS)


def _interrupted(api: Api, name: str) -> None:
    """Ask whether to cancel; without a terminal nothing is cancelled."""
    shown = one_line(name)
    if not sys.stdin.isatty():
        print(f"{shown} is still being launched: funitel cancel {shown} cancels it", file=sys.stderr)
        return
    try:
        answer = input(f"\nCancel the launch of {shown}? [y/N] ").strip().lower()
    except (EOFError, KeyboardInterrupt):
        answer = ""
        print(file=sys.stderr)
    if answer in ("y", "yes"):
        api.send("POST", path_of(name, "cancel"), {})
        print(f"the launch of {shown} is cancelled", file=sys.stderr)
    else:
        print(f"{shown} is still being launched: funitel list shows how far it is", file=sys.stderr)


# What is shown


@dataclass(slots=True)
class _Display:
    """A bar on a terminal; elsewhere a line for each stage; nothing where it is to be quiet."""

    progress: Progress | None
    is_quiet: bool
    stage: str = ""
    task: Any = None

    def show(self, state: dict[str, Any]) -> None:
        """Show an answer about progress."""
        stage, text = str(state.get("stage")), _text(state)
        if self.progress is not None:
            if self.task is None:
                self.task = self.progress.add_task("", total=1.0, text=text)
            self.progress.update(self.task, completed=_share(state), text=text)
        elif stage != self.stage and not self.is_quiet:
            print(one_line(text), file=sys.stderr, flush=True)
        self.stage = stage

    def stop(self) -> None:
        """Take the bar away."""
        if self.progress is not None:
            self.progress.stop()


@contextmanager
def _shown(*, is_quiet: bool) -> Iterator[_Display]:
    console = console_of(sys.stderr)
    if is_quiet or not console.is_terminal:
        yield _Display(None, is_quiet)
        return
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %", markup=False), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Display(progress, is_quiet)


def _share(state: dict[str, Any]) -> float:
    value = state.get("progress")
    return float(value) if isinstance(value, (int, float)) else 0.0


def _text(state: dict[str, Any]) -> str:
    stage, count, total = str(state.get("stage")).replace("_", " "), state.get("bytes"), state.get("total_bytes")
    if count is None:
        return stage
    return f"{stage} {bytes_text(count)}" + (f" of {bytes_text(total)}" if total is not None else "")
