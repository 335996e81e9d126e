"""What the prompt of a chat asks of the model's template."""

import re

import pytest

from funitel.router.chat import prompt


def test_a_template_is_searched_once_however_many_chats_come(monkeypatch: pytest.MonkeyPatch) -> None:
    num_searches = 0

    class Counting:
        @staticmethod
        def search(pattern: str, text: str) -> re.Match[str] | None:
            nonlocal num_searches
            num_searches += 1
            return re.search(pattern, text)

    monkeypatch.setattr(prompt, "re", Counting)
    template = "{% if tools %}a template of this test{% endif %}"
    assert [prompt._knows_tools(template) for _ in range(3)] == [True] * 3
    assert num_searches == 1
    assert not prompt._knows_tools(template.replace("tools", "toolset"))
