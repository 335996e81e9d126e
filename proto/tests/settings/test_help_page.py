"""The pages of help: what is on which, and that nothing on them is cut."""

import re
from typing import Any

import pytest

from funitel.proto.settings.help_page import Flag, HelpPage
from funitel.proto.settings.suggestions import did_you_mean, nearest

GROUPS = {"model": "Model", "network": "Addresses and connections", "logs": "Logs, traces and metrics"}


def flag(name: str, group: str, help: str = "A text.", **changes: Any) -> Flag:
    spelling = f"--{name.replace('_', '-')} TEXT"
    given = {"default": "", "variable": name.upper(), "is_switch": False} | changes
    return Flag(name, spelling, help, group=GROUPS[group], **given)


FLAGS = (
    flag("port", "network", "Port to listen on; any. More words. One of 1, 2.", default="3000"),
    flag("model_id", "model", "Model to serve."),
    *(flag(f"rare_{number}", "network", "Seldom needed.") for number in range(20)),
    flag("otlp_endpoint", "logs", "Where spans go, as a-very-long-word-" + "x" * 40 + "."),
)


def page(width: int = 80, flags: tuple[Flag, ...] = FLAGS) -> HelpPage:
    return HelpPage("prog", "prog [FLAGS]", "Does it.", flags, commands=[("go", "Goes.")], width=width)


def test_the_short_page_has_the_common_flags_and_says_how_to_see_the_rest() -> None:
    text = page().short()
    assert "--port TEXT" in text
    assert "Port to listen on. One of 1, 2. [default: 3000]" in " ".join(text.split())
    assert "--rare-3" not in text
    assert text.index("--model-id") < text.index("--port")  # in the order of groups
    for words in ("go ", "--help=all shows all 23 flags", "model, network, logs", "--help=WORD"):
        assert words in text


def test_a_program_with_few_flags_shows_them_all_at_once() -> None:
    text = page(flags=FLAGS[:4]).short()
    assert "--rare-1" in text
    assert "--help=all" not in text


@pytest.mark.parametrize("width", [30, 60, 80, 100])
def test_nothing_is_cut_and_no_line_is_too_long(width: int) -> None:
    for text in (page(width).short(), page(width).all()):
        assert max(map(len, text.splitlines())) < width
        assert "…" not in text
        assert "..." not in text
    whole = page(width).all()
    for each in FLAGS:
        assert re.search(rf"^  {each.spelling.split()[0]}\b", whole, re.MULTILINE)
    assert "".join(FLAGS[-1].help.split()) in "".join(whole.split())


@pytest.mark.parametrize(
    ("topic", "found"),
    [
        ("logs", ["otlp_endpoint"]),
        ("LOGS", ["otlp_endpoint"]),
        ("serve", ["model_id"]),
        ("PORT", ["port"]),
        ("--port", ["port"]),
        ("spans go", ["otlp_endpoint"]),
    ],
)
def test_a_topic_is_a_group_or_a_word_of_names_and_descriptions(topic: str, found: list[str]) -> None:
    text = page().about_topic(topic)
    assert text is not None
    assert re.findall(r"^  --(\S+)", text, re.MULTILINE) == [name.replace("_", "-") for name in found]


def test_a_topic_that_is_unknown_is_answered_with_the_nearest() -> None:
    assert page().about_topic("prot") is None
    assert page().about_topic(" ") is None
    assert "did you mean port?" in page().no_topic("prot")
    assert page().no_topic("xyzzy").endswith("groups: model, network, logs")


def test_suggestions_are_the_most_similar_words_first() -> None:
    assert nearest("--prot", ["--port", "--ngrok", "--dtype"]) == ["--port"]
    assert nearest("--max-batch", ["--max-batch-size", "--port"]) == ["--max-batch-size"]
    assert nearest("SERVE", ["serve", "spec"]) == ["serve"]
    assert nearest("xyzzy", ["serve"]) == []
    assert did_you_mean("serev", ["serve", "spec"]) == ": did you mean serve?"
    assert did_you_mean("xyzzy", ["serve"]) == ""
