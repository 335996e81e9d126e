"""Chats are rendered in a process of its own: bombs end in one clear error, and the event loop never waits."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes import CHAT_TEMPLATE, eventually

from funitel.proto.errors import TemplateError
from funitel.router.sandbox import pool
from funitel.router.text import template_renderer as module
from funitel.router.text.chat_template import ChatTemplate
from funitel.router.text.template_renderer import TemplateRenderer, TemplateTexts

USER = {"role": "user", "content": "Hi"}
MEMORY_LIMIT = 256 << 20
SECONDS = 1.0
BOMB_SECONDS = 0.25
SLACK_SECONDS = 5.0  # for a busy machine to start and kill processes

Renderer = Callable[..., TemplateRenderer]


@pytest.fixture(autouse=True)
def render_here() -> None:
    """Not here: processes are what is tested."""


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    """`renderer(source, time_limit=1.0, **special_tokens)`, closed at the end."""
    made: list[TemplateRenderer] = []

    def make(source: str, time_limit: float = SECONDS, **special_tokens: str) -> TemplateRenderer:
        texts = TemplateTexts(source, special_tokens)
        made.append(TemplateRenderer(texts, 2, time_limit=time_limit, memory_limit=MEMORY_LIMIT))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def refusal(renderer: TemplateRenderer, *messages: dict[str, Any], **wishes: Any) -> str:
    with pytest.raises(TemplateError) as caught:
        await renderer.render(messages or (USER,), **wishes)
    return caught.value.message


async def test_a_prompt_is_what_the_template_makes_of_the_chat(renderer: Renderer) -> None:
    source = CHAT_TEMPLATE + "{{ bos_token }}{{ tools | tojson }}{{ nice }}"
    wishes: dict[str, Any] = {"tools": [{"é": 1.5}], "variables": {"nice": "\U0001f600"}, "continues": False}
    expected = ChatTemplate(source, {"bos_token": "<s>"}).render([USER], **wishes)
    assert (await renderer(source, bos_token="<s>").render([USER], **wishes)).text == expected


BOMBS = {
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for i in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "a macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a long text": "{% set n = 10 ** 9 %}{{ 'a' * (n * 9) }}",
    "a long list": "{% set n = 10 ** 10 %}{{ ([1] * n) | length }}",
    "a large number": "{% set n = 10 ** 8 %}{{ (7 ** n) % 10 }}",
    "a width": "{% set n = 10 ** 10 %}{{ 'a'.ljust(n) }}",
    "a format": "{{ '%*d' % (2147483647, 1) }}{{ '{:2147483647}'.format(1) }}",
    "an indent": "{% set n = 10 ** 10 %}{{ [1] | tojson(indent=n) }}",
    "doubling": "{% set n = namespace(x='a' * 1000) %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "nested references": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | tojson }}",
    "replacing": "{% set a = 'a' * 10 ** 5 %}{{ a.replace('a', a) }}",
    "words": "{{ lipsum(n=10 ** 5, max=10 ** 5) }}",
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_ends_in_one_clear_error(renderer: Renderer, name: str) -> None:
    began = time.monotonic()
    message = await refusal(renderer(BOMBS[name], BOMB_SECONDS))
    assert time.monotonic() - began < BOMB_SECONDS + SLACK_SECONDS
    limits = (
        "more than 0.25 s to render",
        "more than 256 MiB to render",
        "must have at most",
        "maximum recursion depth",
    )
    assert any(limit in message for limit in limits), message


async def test_what_a_client_sends_may_be_the_bomb(renderer: Renderer) -> None:
    greedy = renderer("{{ 'a' * width }}{% for i in range(width) %}{% for j in range(width) %}{% endfor %}{% endfor %}")
    assert (await greedy.render([USER], variables={"width": 3})).text == "aaa"
    assert "more than" in await refusal(greedy, variables={"width": 99_999})
    assert (await greedy.render([USER], variables={"width": 3})).text == "aaa"


async def two_are_ready(renderer: TemplateRenderer) -> None:
    async def are_ready() -> bool:
        return [process.is_ready for process in renderer._pool._processes] == [True, True]

    await eventually(are_ready, "two processes are ready")


async def test_others_are_answered_meanwhile_and_the_loop_goes_on(renderer: Renderer) -> None:
    both = renderer("{% if loops %}" + BOMBS["a loop"] + "{% endif %}{{ messages[0].content }}")
    await asyncio.gather(both.render([USER]), both.render([USER]))
    await two_are_ready(both)
    bomb = asyncio.create_task(refusal(both, variables={"loops": True}))
    await asyncio.sleep(0.05)
    assert (await both.render([USER])).text == "Hi"
    assert not bomb.done()
    assert await bomb == "it takes more than 1 s to render this chat"


async def test_a_bomb_that_goes_off_when_it_is_compiled(
    renderer: Renderer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants are folded by the compiler: it too has its limits, and chat is off."""
    monkeypatch.setattr(pool, "START_LIMIT_SECONDS", 2.0)
    bomb = renderer("{{ 7 ** (10 ** 8) % 10 }}")
    await bomb.warm_up()
    assert "does not start" in await refusal(bomb)
    assert "chat is off" in caplog.text


async def test_a_template_that_is_none_is_said_once(renderer: Renderer, caplog: pytest.LogCaptureFixture) -> None:
    broken = renderer("{% if %}")
    both = await asyncio.gather(refusal(broken), refusal(broken))
    assert all("not valid" in message for message in both)
    await broken.warm_up()
    assert await refusal(broken) == await refusal(broken)
    assert caplog.text.count("chat is off") == 1


async def test_a_prompt_has_a_largest_size(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROMPT_CHARACTERS", 1000)
    long = renderer("{{ messages[0].content * 3 }}")
    assert len((await long.render([{"role": "user", "content": "é" * 333}])).text) == 999
    message = await refusal(long, {"role": "user", "content": "é" * 334})
    assert message == "the prompt must have at most 1000 characters, given 1002"


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.__class__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ raise_exception.__globals__ }}",
    "{% import 'os' as os %}{{ os }}",
    "{{ messages | attr('__class__') }}",
    "{{ (messages | map(attribute='__class__') | list)[0] }}",
)


async def test_a_template_cannot_reach_python() -> None:
    """CVE-2024-34359 and the like: no attribute leads out of the sandbox."""
    for source in ESCAPES:
        with suppress(TemplateError):
            assert ChatTemplate(source, {}).render([USER]) == "", source


async def test_a_client_that_leaves_costs_no_process(renderer: Renderer) -> None:
    patient = renderer("{% for i in range(99999) %}{% for j in range(n) %}{% endfor %}{% endfor %}", 60.0)
    await patient.render([USER], variables={"n": 1})
    (process,) = patient._pool._processes
    leaving = asyncio.create_task(patient.render([USER], variables={"n": 5}))
    await asyncio.sleep(0.02)
    leaving.cancel()
    assert process.tasks
    await eventually(lambda: asyncio.sleep(0, not process.tasks), "the process is idle again")
    assert patient._pool._processes == {process}
    assert process.is_ready


ORPHAN = """
import asyncio, json, sys
from funitel.router.text.template_renderer import TemplateRenderer, TemplateTexts
async def main():
    renderer = TemplateRenderer(TemplateTexts(sys.argv[1], {}), 1, time_limit=600)
    rendering = asyncio.create_task(renderer.render([{"role": "user", "content": "Hi"}]))
    while True:
        await asyncio.sleep(0.05)
        print("on", flush=True)
asyncio.run(main())
"""


def test_a_bomb_does_not_outlive_a_router_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN, BOMBS["a loop"]], stdout=subprocess.PIPE) as router:
        children: list[int] = []
        while not children:
            children = [int(pid) for pid in Path(f"/proc/{router.pid}/task/{router.pid}/children").read_text().split()]
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(router.pid, signal.SIGKILL)
    deadline = time.monotonic() + SLACK_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.05)
