"""Tokens, offsets, the files of a model folder, and templates as transformers renders them."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fakes import byte_tokenizer, write_model

from funitel.proto.errors import InvalidRequest, StartupError, TemplateError
from funitel.router.text.chat_template import ChatTemplate
from funitel.router.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}


def render(source: str, *messages: dict[str, Any], **special_tokens: str) -> str:
    turns = messages or (USER,)
    return ChatTemplate(source, special_tokens).render(turns, continues=turns[-1]["role"] == "assistant")


async def prompt(folder: Path, config_path: str | None = None) -> str:
    tokenizer = Tokenizer.load(str(folder), config_path, 1)
    try:
        return (await tokenizer.chat_prompt([USER])).text
    finally:
        await tokenizer.close()


async def test_encode_adds_special_tokens_unless_told_not_to(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(write_model(tmp_path)), None, 2)
    start = byte_tokenizer().token_to_id("<s>")
    with_start = await tokenizer.encode("aé")
    without = await tokenizer.encode("aé", add_special_tokens=False)
    rows = json.loads(await tokenizer.listed("aé", add_special_tokens=False))
    await tokenizer.close()
    assert with_start == (start, *without)
    assert [row["id"] for row in rows] == [*without]
    assert [(row["text"], row["start"], row["stop"]) for row in rows] == [("a", 0, 1), ("é", 1, 3), ("é", 1, 3)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 258),
        ({"vocab_size": 250}, 250),
        ({"vocab_size": 320}, 258),
        ({"text_config": {"vocab_size": 251}}, 251),
    ],
)
def test_the_vocabulary_is_what_tokenizer_and_model_share(
    tmp_path: Path, config: dict[str, Any], expected: int
) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(str(tmp_path), None, 1)
    assert tokenizer.num_tokens == expected


async def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    write_model(tmp_path)
    narrow = byte_tokenizer()
    narrow.enable_truncation(3)
    narrow.enable_padding(length=50)
    narrow.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(str(tmp_path), None, 1)
    assert len(await tokenizer.encode("abcdefgh", add_special_tokens=False)) == 8
    await tokenizer.close()


@pytest.mark.parametrize("text", ["", "\0", "a\0b", "<s></s>", "\U0001f680" * 1000, "x" * 200_000])
async def test_any_text_can_be_encoded(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(str(write_model(tmp_path)), None, 1)
    ids = await tokenizer.encode(text)
    assert [row["id"] for row in json.loads(await tokenizer.listed(text))] == [*ids]
    await tokenizer.close()


def test_blocks_are_trimmed_as_transformers_does() -> None:
    source = "{% for message in messages %}\n    {% if true %}\n{{ message.content }}\n    {% endif %}\n{% endfor %}"
    assert render(source) == "Hi\n"


def test_loop_controls() -> None:
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"  # noqa: E501
    assert render(source) == "02"


def test_generation_blocks_only_enclose() -> None:
    assert render("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}!") == "Hi!"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_special_tokens_and_tools_are_variables() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ add_generation_prompt }}"
    assert render(source, bos_token="<s>", eos_token="</s>") == "<s></s>TrueTrue"


def test_python_methods_and_slices() -> None:
    source = "{% set m = messages[::-1] %}{{ m[0].content.strip().upper() }}{{ m[0].get('name', '-') }}"
    assert render(source) == "HI-"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
    ],
)
def test_a_template_that_refuses_is_a_template_error(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(source)


def test_a_template_that_is_not_valid() -> None:
    with pytest.raises(TemplateError, match="not valid"):
        ChatTemplate("{% if %}", {})


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501


def test_the_last_message_of_the_assistant_is_continued() -> None:
    begun = {"role": "assistant", "content": "Hello, I "}
    assert render(TURNS, USER, begun) == "<user>Hi<end>\n<assistant>Hello, I"


def test_only_the_last_occurrence_is_cut_after() -> None:
    begun = {"role": "assistant", "content": "Hi"}
    assert render(TURNS, USER, begun) == "<user>Hi<end>\n<assistant>Hi"


def test_an_empty_message_of_the_assistant_asks_for_one() -> None:
    empty = {"role": "assistant", "content": ""}
    assert render(TURNS, USER, empty) == "<user>Hi<end>\n<assistant>"


def test_a_template_that_hides_the_last_message() -> None:
    with pytest.raises(TemplateError, match="does not show it"):
        render("{{ messages[0].content }}", USER, {"role": "assistant", "content": "begun"})


async def test_template_precedence(tmp_path: Path) -> None:
    write_model(tmp_path, chat_template="config")
    assert await prompt(tmp_path) == "config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert await prompt(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert await prompt(tmp_path) == "jinja"
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"chat_template": [{"name": "default", "template": "own"}]}))
    assert await prompt(tmp_path, str(own)) == "own"


async def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert await prompt(write_model(tmp_path, chat_template=named)) == "plain"


@pytest.mark.parametrize("is_file", [False, True])
async def test_a_chat_with_tools_takes_the_template_for_it(tmp_path: Path, is_file: bool) -> None:
    named = [{"name": "tool_use", "template": "with {{ tools[0] }}"}, {"name": "default", "template": "plain"}]
    write_model(tmp_path, chat_template="plain" if is_file else named)
    if is_file:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named[0]["template"])
    tokenizer = Tokenizer.load(str(tmp_path), None, 1)
    assert (await tokenizer.chat_prompt([USER], tools=["it"])).text == "with it"
    assert (await tokenizer.chat_prompt([USER])).text == "plain"
    assert tokenizer.template_source(with_tools=True).startswith("with")
    assert tokenizer.template_source(with_tools=False) == "plain"
    await tokenizer.close()


async def test_special_tokens_of_ids(tmp_path: Path) -> None:
    write_model(tmp_path, bos_token=None, eos_token=None, chat_template="{{ bos_token }}|{{ eos_token }}")
    ids = {name: byte_tokenizer().token_to_id(name) for name in ("<s>", "</s>")}
    content = {"bos_token_id": ids["<s>"], "eos_token_id": [ids["</s>"], 3]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert await prompt(tmp_path) == "<s>|</s>"


@pytest.mark.parametrize("template", [None, "{% if %}"])
async def test_without_a_usable_template_only_chats_fail(tmp_path: Path, template: str | None) -> None:
    write_model(tmp_path, chat_template=template)
    with pytest.raises(TemplateError):
        await prompt(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="tokenizer.json does not exist"):
        Tokenizer.load(str(tmp_path), None, 1)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    (write_model(tmp_path) / name).write_text("{")
    with pytest.raises(StartupError, match=f"{name} cannot be read"):
        Tokenizer.load(str(tmp_path), None, 1)


async def test_a_text_that_cannot_be_tokenized_is_refused_by_its_field(tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path), None, 1)
    tokenizer.pool._calls.tokenizer = None  # type: ignore[assignment]  # fails as the library does: by any exception
    try:
        with pytest.raises(InvalidRequest, match="^`messages` cannot be tokenized$") as caught:
            await tokenizer.encode("Hi", field="messages")
    finally:
        await tokenizer.close()
    assert caught.value.param == "messages"
