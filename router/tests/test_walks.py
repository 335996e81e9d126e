"""The rooms of `scripts/walks.toml` are those that a request enters: no fewer, and no more."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from walks import PLANNING, Walk, ask, router

WALKS: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "scripts/walks.toml").read_text())
NUM_TOKENS, FIRST, LAST = 24, 8, 16
BODIES = {
    "/generate_stream": {"inputs": "hello", "parameters": {"max_new_tokens": NUM_TOKENS}},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": NUM_TOKENS,
        "stream": True,
    },
}


@pytest.fixture(autouse=True)
def render_here() -> None:
    """Render chats in a sandbox, as a router does."""


@pytest.fixture(autouse=True)
def files_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the watch of the API keys, which goes by the clock, out of what a request enters."""
    monkeypatch.setattr("funitel.router.core.file_watch.POLL_SECONDS", 3600.0)


def rooms(name: str) -> set[str]:
    """Modules of a walk."""
    return {step.partition(":")[0] for part in WALKS["walks"][name]["parts"] for step in WALKS["parts"][part]}


@pytest.mark.parametrize("name", [name for name, walk in WALKS["walks"].items() if "path" in walk])
async def test_a_request_enters_the_rooms_of_its_walk(name: str, tmp_path: Path) -> None:
    path = WALKS["walks"][name]["path"]
    async with router(tmp_path) as port:
        await ask(port, "POST", path, BODIES[path])  # what happens once only is no part of the walk
        with Walk() as walk:
            answer = await ask(port, "POST", path, BODIES[path])
    assert b" 200 " in answer
    check(name, walk)


@pytest.mark.parametrize("name", [name for name, walk in WALKS["walks"].items() if "token_of" in walk])
async def test_a_token_enters_the_rooms_of_its_walk(name: str, tmp_path: Path) -> None:
    path, walk = WALKS["walks"][name]["token_of"], Walk(without=PLANNING)

    def hear(num_events: int) -> None:
        if FIRST <= num_events < LAST:
            walk.__enter__()
        else:
            walk.__exit__()

    async with router(tmp_path) as port:
        await ask(port, "POST", path, BODIES[path])
        await ask(port, "POST", path, BODIES[path], hear)
    check(name, walk)


def check(name: str, walk: Walk) -> None:
    entered = {room for room in walk.calls if room not in WALKS["records"]}
    listed = {room for room in rooms(name) if room.startswith("router.")}
    assert sorted(entered - listed) == [], {room: walk.calls[room] for room in entered - listed}
    assert sorted(listed - walk.calls.keys()) == []
