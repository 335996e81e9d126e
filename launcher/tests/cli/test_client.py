"""The clients against a fake server, in process: what they ask, what they keep, what they say when it fails."""

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.cli.chat import Conversation, Piece
from funitel.launcher.cli.generate import generate
from funitel.launcher.cli.server import connected
from funitel.launcher.cli.settings import ChatSettings, GenerateSettings
from funitel.launcher.terminal_ui.http_client import Api
from funitel.launcher.terminal_ui.terminal import Status, piped_messages
from funitel.proto.errors import FunitelError, InvalidRequest, NotReady, SettingsError, Unauthorized
from funitel_testing.fake_api import FakeApi, serving

Start = Callable[..., FakeApi]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(**behaviour)`: a fake server for the length of the test."""
    with ExitStack() as stack:
        yield lambda **behaviour: stack.enter_context(serving(FakeApi(**behaviour)))


def conversation(fake: FakeApi, **settings: Any) -> Conversation:
    return Conversation(Api(fake.url), ChatSettings(**settings))


# Conversations


def test_a_conversation_remembers_what_was_said(start: Start) -> None:
    fake = start()
    talk = conversation(fake, system="Be brief.", temperature=0.5, max_tokens=7)
    assert list(talk.answer("Hi")) == [Piece("Hello"), Piece(" there")]
    list(talk.answer("Again"))
    first, second = fake.bodies
    system = {"role": "system", "content": "Be brief."}
    assert first["messages"] == [system, {"role": "user", "content": "Hi"}]
    assert {name: first[name] for name in ("stream", "temperature", "max_tokens")} == {
        "stream": True,
        "temperature": 0.5,
        "max_tokens": 7,
    }
    assert not {"seed", "top_p"} & first.keys()
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "Again"},
    ]
    talk.reset()
    list(talk.answer("Anew"))
    assert fake.bodies[2]["messages"] == [system, {"role": "user", "content": "Anew"}]
    talk.set_system(None)
    list(talk.answer("Plain"))
    assert fake.bodies[3]["messages"] == [{"role": "user", "content": "Plain"}]


def test_an_answer_left_early_is_kept_as_far_as_it_came(start: Start) -> None:
    fake = start(words=("One", " two", " three"))
    talk = conversation(fake)
    with closing(talk.answer("Count")) as pieces:
        assert next(pieces) == Piece("One")
    list(talk.answer("Go on"))
    assert fake.bodies[1]["messages"][1] == {"role": "assistant", "content": "One"}


def test_thoughts_are_told_apart_and_not_kept(start: Start) -> None:
    fake = start(thoughts=("Hm", "."))
    talk = conversation(fake)
    with closing(talk.answer("Lost")) as pieces:
        assert next(pieces) == Piece("Hm", is_thought=True)
    thoughts = [Piece("Hm", is_thought=True), Piece(".", is_thought=True)]
    assert list(talk.answer("Hi")) == [*thoughts, Piece("Hello"), Piece(" there")]
    list(talk.answer("Again"))
    assert [message["content"] for message in fake.bodies[1]["messages"]] == ["Hi"]
    assert [message["content"] for message in fake.bodies[2]["messages"]] == ["Hi", "Hello there", "Again"]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"fails_after": 1}, "the step failed"),
        ({"breaks_after": 1}, "^the server ended the answer without a finish reason$"),
        ({"ends_after": 2}, "^the server ended the answer without a finish reason$"),
        ({"status": 422, "refusal": {"error": "too long", "error_type": "validation"}}, "^too long$"),
        ({"status": 400, "refusal": {"error": {"message": "no such field"}}}, "^no such field$"),
        ({"status": 500, "refusal": "oops"}, "answers with status 500$"),
    ],
)
def test_a_failed_answer_is_forgotten(start: Start, behaviour: dict[str, Any], message: str) -> None:
    fake = start(**behaviour)
    talk = conversation(fake)
    with pytest.raises(FunitelError, match=message):
        list(talk.answer("Hi"))
    fake.fails_after = fake.breaks_after = fake.ends_after = None
    fake.status = 200
    list(talk.answer("Again"))
    assert fake.bodies[1]["messages"] == [{"role": "user", "content": "Again"}]


def test_it_knows_that_an_answer_was_cut(start: Start) -> None:
    fake = start(finish_reason="length")
    talk = conversation(fake)
    list(talk.answer("Hi"))
    assert talk.is_cut
    fake.finish_reason = "stop"
    list(talk.answer("Hi"))
    assert not talk.is_cut


# Servers


@pytest.mark.parametrize(
    "url", ["ftp://a", "http://", "http://a:0", "http://a:99999", "http://[", "", "http://a http://b", "http://a\n"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="--url must be like http://host:port, given "):
        Api(url)


def test_a_url_may_lack_its_scheme_and_have_a_version(start: Start) -> None:
    fake = start()
    for url in (fake.url.removeprefix("http://"), f"{fake.url}/", f"{fake.url}/v1"):
        assert Api(url).get("/info") == {"model_id": "fake"}


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        NotReady, match=r"^no server answers at http://127.0.0.1:1: .*refused; start one by funitel serve MODEL, "
    ):
        Api("127.0.0.1:1").get("/info")


def test_a_key_is_asked_for_and_sent(start: Start) -> None:
    fake = start(key="sesame")
    with pytest.raises(Unauthorized, match="missing or wrong API key: give --api-key or set FUNITEL_API_KEY"):
        Api(fake.url).get("/info")
    assert Api(fake.url, "sesame").get("/info") == {"model_id": "fake"}


def test_a_server_that_is_starting_is_waited_for(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    fake = start(starting=3)
    with connected(ChatSettings(url=fake.url)) as api:
        assert api.url == fake.url
    assert capsys.readouterr().err == f"{fake.url}: unhealthy: starting: waiting for the model shards\n"


def test_a_server_of_another_model_is_refused(start: Start) -> None:
    fake = start()
    with connected(ChatSettings(url=fake.url, model_id="fake")):
        pass
    with (
        pytest.raises(FunitelError, match=r"serves fake, not other$"),
        connected(ChatSettings(url=fake.url, model_id="other")),
    ):
        pass
    fake.info = ["something else"]
    with pytest.raises(FunitelError, match="is not a funitel server"), connected(ChatSettings(url=fake.url)):
        pass


def test_the_usual_port_is_looked_at_first(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = start()
    monkeypatch.setattr("funitel.launcher.cli.server.LOCAL_URL", fake.url)
    with connected(ChatSettings()) as api:
        assert api.url == fake.url


# Completions


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"do_sample": False}),
        ({"temperature": 0.0, "top_p": 0.5, "seed": 1}, {}),
        ({"temperature": 0.7, "seed": 3}, {"temperature": 0.7, "seed": 3, "do_sample": True}),
        ({"top_p": 1.0}, {"do_sample": True}),
        ({"top_k": 5, "top_p": 0.5}, {"top_k": 5, "top_p": 0.5, "do_sample": True}),
    ],
)
def test_saying_anything_about_drawing_asks_for_a_sample(
    start: Start, settings: dict[str, Any], expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fake = start()
    generate(GenerateSettings(prompt="Once", url=fake.url, max_tokens=9, stop=("x",), **settings))
    (body,) = fake.bodies
    always = {"max_new_tokens": 9, "details": True, "stop": ["x"]}
    assert body == {"inputs": "Once", "parameters": always | expected}
    assert capsys.readouterr().out == "Hello there\n"


def test_json_tells_the_whole(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    fake = start(words=("Ünï", "cödé"))
    generate(GenerateSettings(prompt="Once", url=fake.url, json=True))
    assert json.loads(capsys.readouterr().out) == {
        "model": "fake",
        "prompt": "Once",
        "text": "Ünïcödé",
        "finish_reason": "length",
        "num_tokens": 3,
        "num_prompt_tokens": 2,
        "seed": None,
    }


@pytest.mark.parametrize("prompt", ["", "\udcff"])
def test_a_prompt_must_be_a_text(prompt: str) -> None:
    with pytest.raises(InvalidRequest, match="the prompt must"):
        generate(GenerateSettings(prompt=prompt))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "--max-tokens must be >= 1, given 0"),
        ({"temperature": -1.0}, "--temperature must be within 0..100, given -1.0"),
        ({"top_p": 0.0}, "--top-p must be within (0, 1], given 0.0"),
        ({"seed": -1}, "--seed must be within 0..18446744073709551615, given -1"),
        ({"top_k": 0}, "--top-k must be >= 1, given 0"),
        ({"stop": ("",)}, "--stop must not be empty"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        GenerateSettings(prompt="a", **wrong)
    assert caught.value.message == message


# Terminal


def test_messages_of_a_pipe_are_lines_or_blocks() -> None:
    text = b'one\r\n\n"""\ntwo\nthree\n"""\n"""four"""\nf\xc3\xbcnf\xff\n"""open\nend'
    assert list(piped_messages(io.BytesIO(text))) == ["one", "", "two\nthree", "four", "fünf\ufffd", "open\nend"]


def test_a_status_on_a_terminal_is_replaced_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    with Status(stream) as status:
        status.show("starting \x1b[2J[red] " + "long " * 9)
    written = stream.getvalue()
    assert r"\x1b[2J[red]" in written
    assert "\x1b[2J" not in written
    assert max(map(len, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written).replace("\r", "\n").splitlines())) <= 20
    assert written.endswith("\x1b[1A\x1b[2K"), "the status is gone"


def test_a_status_is_a_line_for_each_change() -> None:
    stream = io.StringIO()
    with Status(stream) as status:
        for text in ("a", "a", "b"):
            status.show(text)
    assert stream.getvalue() == "a\nb\n"
