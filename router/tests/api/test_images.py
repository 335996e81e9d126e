"""Images in the requests of every API: where they stand in the prompt, what they count, and what is refused."""

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from fake_media import FACTS, IMAGE, NUM_TOKENS, FakeMedia, key_of, with_images
from fakes import LIMITS, FakeEngine, Serve, write_model
from media_oracles import ORACLES, TOKENIZER
from PIL import Image

from funitel.proto.step import MediaKind
from funitel.router.media.service import MediaService
from funitel.router.settings import RouterSettings

PNG = "data:image/png;base64,aWNv"
EXPANDED = f"{IMAGE * 3},{IMAGE * 2}"
LISTS_ONLY = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOTH = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def template() -> str:
    return BOTH


@pytest.fixture
def model(tmp_path: Path, template: str) -> Path:
    return write_model(tmp_path, chat_template=template)


@pytest.fixture
def media(model: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMedia:
    return with_images(model, monkeypatch)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(limits=replace(LIMITS, max_input_tokens=200, max_total_tokens=300, media=FACTS))


@pytest.fixture
async def client(serve: Serve, engine: FakeEngine, media: FakeMedia) -> AsyncIterator[httpx.AsyncClient]:
    async with serve(engine) as client:
        yield client


def prompt(model: Path, engine: FakeEngine) -> str:
    """The prompt of the last request, with each placeholder."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    return tokenizer.decode(list(engine.requests[-1].input_ids), skip_special_tokens=False)


def check_spans(engine: FakeEngine, media: FakeMedia, *urls: str) -> None:
    """The request has the images of these URLs, each with its places in the prompt."""
    request = engine.requests[-1]
    assert [each.input.key for each in request.media] == [key_of(url) for url in urls]
    for each in request.media:
        ids = request.input_ids[each.span.position : each.span.end]
        assert each.span.key == each.input.key
        assert (len(ids), ids.count(media.placeholder)) == (NUM_TOKENS, 5)
    assert request.input_ids.count(media.placeholder) == 5 * len(urls)


def openai(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": list(content)}]} | fields


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image_url(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


# Shapes


@pytest.mark.parametrize("url", [PNG, {"url": PNG}, {"url": PNG, "detail": "low"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_openais_chats(
    client: httpx.AsyncClient, engine: FakeEngine, media: FakeMedia, model: Path, url: Any, stream: bool
) -> None:
    body = openai(text("Look: "), image_url(url), text("!"), stream=stream, stream_options={"include_usage": True})
    if not stream:
        del body["stream_options"]
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert prompt(model, engine) == f"[user]Look: {EXPANDED}!\n[assistant]"
    check_spans(engine, media, PNG)
    assert media.seen[0].detail == (url.get("detail", "") if isinstance(url, dict) else "")
    count = len(engine.requests[-1].input_ids)
    assert f'"prompt_tokens":{count}' in response.text
    assert engine.requests[-1].inputs.count(IMAGE) == 2, "the text has each run once"


async def test_several_images_and_a_result_of_a_tool(
    client: httpx.AsyncClient, engine: FakeEngine, media: FakeMedia, model: Path
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [image_url("http://a"), text("and"), image_url("http://b")]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text("found "), image_url("http://a")]},
    ]
    response = await client.post("/v1/chat/completions", json=openai(messages=messages))
    assert response.status_code == 200, response.text
    assert f"[user]{EXPANDED}and{EXPANDED}\n" in prompt(model, engine)
    assert f"[tool]found {EXPANDED}\n[assistant]" in prompt(model, engine)
    check_spans(engine, media, "http://a", "http://b", "http://a")
    places = [source.place for source in media.seen]
    assert places == [f"messages.{place}.image_url" for place in ("0.content.0", "0.content.2", "2.content.1")]


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_messages(
    client: httpx.AsyncClient, engine: FakeEngine, media: FakeMedia, model: Path, stream: bool
) -> None:
    given = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aWNv"}}
    url = {"type": "image", "source": {"type": "url", "url": "http://b"}}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [url, text("seen")], "is_error": True}
    messages = [
        {"role": "user", "content": [text("a"), given, text("b"), text("c")]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, text("So?")]},
    ]
    body = {"model": "m", "max_tokens": 3, "messages": messages}
    response = await client.post("/v1/messages", json=body | {"stream": stream})
    assert response.status_code == 200, response.text
    found = prompt(model, engine)
    assert f"[user]a{EXPANDED}b\nc\n" in found
    assert f"[tool]Error: {EXPANDED}seen\n[user]So?\n[assistant]" in found
    check_spans(engine, media, PNG, "http://b")
    places = [source.place for source in media.seen]
    assert places == ["messages.0.content.1.source", "messages.2.content.0.content.0.source"]
    del body["max_tokens"]
    count = (await client.post("/v1/messages/count_tokens", json=body)).json()
    assert count == {"input_tokens": len(engine.requests[-1].input_ids)}


async def test_responses(client: httpx.AsyncClient, engine: FakeEngine, media: FakeMedia, model: Path) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    seen = {"type": "input_image", "image_url": PNG, "detail": "original"}
    output = {"type": "function_call_output", "call_id": "c", "output": [seen, {"type": "input_text", "text": "x"}]}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "http://b"}]
    items = [{"role": "user", "content": parts}, call, output]
    response = await client.post("/v1/responses", json={"input": items, "max_output_tokens": 3})
    assert response.status_code == 200, response.text
    found = prompt(model, engine)
    assert f"[user]a{EXPANDED}\n" in found
    assert f"[tool]{EXPANDED}x\n[assistant]" in found
    check_spans(engine, media, "http://b", PNG)
    assert [source.detail for source in media.seen] == ["", "high"]
    assert response.json()["usage"]["input_tokens"] == len(engine.requests[-1].input_ids)
    count = (await client.post("/v1/responses/input_tokens", json={"input": items})).json()
    assert count["input_tokens"] == len(engine.requests[-1].input_ids)
    further = {"input": "And?", "previous_response_id": response.json()["id"], "max_output_tokens": 3}
    response = await client.post("/v1/responses", json=further)
    assert response.status_code == 200, response.text
    check_spans(engine, media, "http://b", PNG)
    assert media.seen[-1].place == "previous_response_id"


@pytest.mark.parametrize(
    "path", ["/generate", "/generate_stream", "/", "/invocations", "/vertex", "/v2/models/m/versions/1/infer"]
)
async def test_tgis_notation(
    client: httpx.AsyncClient, engine: FakeEngine, media: FakeMedia, model: Path, path: str
) -> None:
    inputs = f"Look: ![]({PNG}) and ![](http://b)! ![alt](c) ![]("
    parameters = {"max_new_tokens": 3, "return_full_text": True}
    body: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    if path == "/vertex":
        body = {"instances": [body]}
    elif path.endswith("infer"):
        given = {"name": "a", "shape": [1], "datatype": "BYTES", "data": [inputs]}
        body = {"inputs": [given], "outputs": [{"name": "b"}], "parameters": parameters}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert prompt(model, engine) == f"<s>Look: ({EXPANDED}) and ({EXPANDED})! ![alt](c) ![]("
    check_spans(engine, media, PNG, "http://b")
    assert "base64" not in response.text, "the full text has the prompt as the model reads it"


async def test_a_query_of_steps_has_its_images(client: httpx.AsyncClient, engine: FakeEngine, media: FakeMedia) -> None:
    body = {"inputs": "![](http://a)", "parameters": {"max_new_tokens": 3}}
    response = await client.post("/v1/steps/queries", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["prompt_tokens"] == len("<") + len("()") + NUM_TOKENS


async def test_completions_are_text(client: httpx.AsyncClient, engine: FakeEngine, media: FakeMedia) -> None:
    response = await client.post("/v1/completions", json={"model": "m", "prompt": "![](http://a)", "max_tokens": 3})
    assert response.status_code == 200, response.text
    assert not engine.requests[-1].media
    assert not media.seen


async def test_tokens_of_images_are_listed(client: httpx.AsyncClient, media: FakeMedia) -> None:
    rows = (await client.post("/tokenize", json={"inputs": "a![](http://a)b"})).json()
    assert [row["text"] for row in rows[1:]] == ["a", "(", *[IMAGE] * 3, ",", *[IMAGE] * 2, ")", "b"]
    body = openai(text("a"), image_url("http://a"))
    answer = (await client.post("/chat_tokenize", json=body)).json()
    assert [row["id"] for row in answer["tokenize_response"]].count(media.placeholder) == 5
    assert answer["templated_text"] == f"[user]a{IMAGE},{IMAGE}\n[assistant]"
    answer = (await client.post("/tokenize", json={"model": "m", "messages": body["messages"]})).json()
    assert answer["tokens"].count(media.placeholder) == 5
    assert answer["count"] == len(answer["tokens"]) == len("[user]a\n[assistant]") + NUM_TOKENS


# Templates and markers


@pytest.mark.parametrize("template", [LISTS_ONLY])
async def test_a_template_of_lists_gets_every_content_as_one(
    client: httpx.AsyncClient, engine: FakeEngine, model: Path
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho "}]
    await client.post("/v1/chat/completions", json=openai(messages=messages))
    assert prompt(model, engine) == "[user]Hi\n[assistant]Ho"
    await client.post("/v1/chat/completions", json=openai(image_url(PNG), text("Hi")))
    assert prompt(model, engine) == f"[user]{EXPANDED}Hi\n[assistant]"


@pytest.mark.parametrize("template", ["{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}"])
async def test_a_template_of_texts_has_the_marker_in_them(
    client: httpx.AsyncClient, engine: FakeEngine, media: FakeMedia, model: Path
) -> None:
    await client.post("/v1/chat/completions", json=openai(text(f"a{IMAGE}"), image_url(PNG), text("b")))
    assert prompt(model, engine) == f"[user]a{IMAGE}({EXPANDED})b\n"
    request = engine.requests[-1]
    assert [each.span.position for each in request.media] == [len("[user]a") + len(IMAGE) + 1]
    assert request.input_ids.count(media.placeholder) == 5


async def test_a_marker_that_a_client_writes_is_text(
    client: httpx.AsyncClient, engine: FakeEngine, media: FakeMedia, model: Path
) -> None:
    content = [text(f"1{IMAGE}"), image_url(PNG), text(f"{IMAGE}2")]
    messages = [{"role": "system", "content": f"Say {IMAGE}"}, {"role": "user", "content": content}]
    response = await client.post("/v1/chat/completions", json=openai(messages=messages))
    assert response.status_code == 200, response.text
    assert prompt(model, engine) == f"[system]Say {IMAGE}\n[user]1{IMAGE}{EXPANDED}{IMAGE}2\n[assistant]"
    check_spans(engine, media, PNG)


# What is refused

_IMAGE_BLOCK = {"type": "image", "source": {"type": "url", "url": "http://x"}}
_SOUND = {"type": "input_audio", "input_audio": {"data": "aWNv", "format": "wav"}}
_SOUND_URL = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,aWNv"}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", openai(image_url(PNG)), "messages.0.content.0.image_url"),
        ("/chat_tokenize", openai(text("a"), image_url(PNG)), "messages.0.content.1.image_url"),
        (
            "/v1/messages",
            {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": [_IMAGE_BLOCK]}]},
            "messages.0.content.0.source",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}]},
            "input.0.content.0.image_url",
        ),
    ],
)
async def test_a_text_model_names_the_field_and_itself(serve: Serve, path: str, body: Any, field: str) -> None:
    engine = FakeEngine()
    async with serve(engine, served_model_name="words") as client:
        response = await client.post(path, json=body)
    assert response.status_code in (400, 422)
    assert f"`{field}`: the model words takes no images, only text" in response.text
    assert not engine.requests


async def test_a_text_model_reads_tgis_notation(serve: Serve, engine: FakeEngine) -> None:
    engine.limits = LIMITS
    async with serve(engine) as client:
        response = await client.post("/generate", json={"inputs": "![](http://a)", "parameters": {"max_new_tokens": 2}})
    assert response.status_code == 200
    assert engine.requests[-1].inputs == "![](http://a)"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([_SOUND], "`messages.0.content.0.input_audio`: the model {model} takes no sounds, only text and images"),
        ([_SOUND_URL], "`messages.0.content.0.audio_url`: the model {model} takes no sounds, only text and images"),
        ([{"type": "audio_url"}], "needs the field `audio_url`"),
        ([{"type": "audio_url", "audio_url": {"url": 5}}], "messages.0.content.0.audio_url.url"),
        ([{"type": "input_audio", "input_audio": {"data": "aWNv", "format": "aac"}}], "input_audio.format"),
        ([image_url("http://bad")], "`messages.0.content.0.image_url` is no image"),
        ([{"type": "image_url"}], "needs the field `image_url`"),
        ([image_url({"url": 5})], "messages.0.content.0.image_url.url"),
        ([image_url({"url": PNG, "detail": "much"})], "messages.0.content.0.image_url.detail"),
        (
            [{"type": "video_url"}],
            "`video_url` is not supported, only `text`, `image_url`, `input_audio` and `audio_url`",
        ),
        (
            [image_url(f"http://{i}") for i in range(25)],
            "images must take at most 1000 bytes. Given: 1050",
        ),
        ([image_url("http://x"), text("a" * 195)], "`messages` must have less than 200 tokens. Given: 219"),
    ],
)
async def test_what_is_refused(client: httpx.AsyncClient, model: Path, content: Any, words: str) -> None:
    response = await client.post("/v1/chat/completions", json=openai(*content))
    assert response.status_code == 422
    assert words.format(model=model) in response.text


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_images_belong_into_messages_of_the_user(client: httpx.AsyncClient, role: str) -> None:
    messages = [{"role": role, "content": [image_url(PNG)]}, {"role": "user", "content": "Hi"}]
    response = await client.post("/v1/chat/completions", json=openai(messages=messages))
    assert response.status_code == 422
    assert f"a message with role `{role}` must be text" in response.text


async def test_files_of_responses_are_refused(client: httpx.AsyncClient) -> None:
    part = {"type": "input_image", "file_id": "f", "image_url": PNG}
    response = await client.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]})
    assert response.status_code == 400
    assert "file_id" in response.text
    assert "send the image in `image_url`" in response.text


@pytest.mark.parametrize(("truncate", "status"), [(NUM_TOKENS + 5, 422), (NUM_TOKENS + 6, 200)])
async def test_a_prompt_with_images_is_never_cut(client: httpx.AsyncClient, truncate: int, status: int) -> None:
    body = {"inputs": "abc![](http://a)", "parameters": {"max_new_tokens": 2, "truncate": truncate}}
    response = await client.post("/generate", json=body)
    assert response.status_code == status, response.text
    if status == 422:
        assert f"`truncate` must be >= {NUM_TOKENS + 6}, the tokens of the prompt" in response.text


async def test_an_item_that_no_step_can_have(serve: Serve, engine: FakeEngine, media: FakeMedia) -> None:
    engine.limits = replace(engine.limits, max_span_tokens=NUM_TOKENS - 1)
    async with serve(engine) as client:
        response = await client.post("/v1/chat/completions", json=openai(image_url(PNG)))
    assert response.status_code == 422
    assert "an image of `messages` must have at most 5 tokens, --max-batch-prefill-tokens. Given: 6" in response.text


# What a server says, and how much it takes


async def test_a_server_says_that_it_takes_images(client: httpx.AsyncClient, serve: Serve, media: FakeMedia) -> None:
    assert (await client.get("/info")).json()["modalities"] == ["text", "image"]
    assert (await client.get("/v1/models")).json()["data"][0]["modalities"] == ["text", "image"]
    async with serve(FakeEngine()) as other:
        assert "modalities" not in (await other.get("/info")).json()
        assert "modalities" not in (await other.get("/v1/models")).json()["data"][0]


@pytest.mark.parametrize(
    ("given", "takes_images", "status"), [(None, True, 200), (None, False, 413), (9000, True, 413)]
)
async def test_a_body_with_images_may_be_larger(
    serve: Serve, engine: FakeEngine, media: FakeMedia, given: int | None, takes_images: bool, status: int
) -> None:
    if not takes_images:
        engine.limits = LIMITS
    body = json.dumps(openai(image_url(PNG + "A" * 2_000_000)))
    async with serve(engine, payload_limit=given) as client:
        response = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert RouterSettings().payload_limit is None


@pytest.mark.parametrize("given", [None, 5_000_000])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_what_is_large_by_lists_is_not_parsed(
    serve: Serve, engine: FakeEngine, media: FakeMedia, given: int | None, path: str
) -> None:
    """Millions of them would block the event loop for seconds; a limit of the operator holds as it is."""
    body = b'{"a": [' + b"[]," * 800_000 + b"1]}"
    async with serve(engine, payload_limit=given) as client:
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
    if given is None:
        assert response.status_code == 413
        assert "at most 2000000 bytes beside the base64 of images. Given: 2400008" in response.text
    else:
        assert response.status_code == 422


async def test_keys_share_no_features_unless_they_share_prefixes(
    serve: Serve, engine: FakeEngine, media: FakeMedia, tmp_path: Path
) -> None:
    """Else the time to the first token would tell that another key has sent the same image."""
    path = tmp_path / "keys"
    lines = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "created": "2026-01-01T00:00:00Z"}
        for name in ("one", "other")
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    path.chmod(0o600)

    async def keys(client: httpx.AsyncClient, *names: str, **fields: Any) -> list[bytes]:
        for name in names:
            body = openai(image_url(PNG), image_url(PNG), **fields)
            head = {"authorization": f"Bearer {name}"}
            assert (await client.post("/v1/chat/completions", json=body, headers=head)).status_code == 200
        for request in engine.requests[-len(names) :]:
            assert len({each.input.key for each in request.media}) == 1
            assert all(each.span.key == each.input.key for each in request.media)
        return [request.media[0].input.key for request in engine.requests[-len(names) :]]

    async with serve(engine, api_key_file=str(path)) as client:
        one, other, again = await keys(client, "one", "other", "one")
        [salted] = await keys(client, "one", cache_salt="s")
    assert one == again
    assert len({one, other, salted, key_of(PNG)}) == 4
    async with serve(engine, api_key_file=str(path), share_prefixes=True) as client:
        assert await keys(client, "one", "other") == [key_of(PNG)] * 2


@pytest.mark.parametrize(
    ("path", "field", "content"),
    [
        ("/generate", "inputs", "a<image>b"),
        ("/v1/completions", "prompt", "a<image>b"),
        ("/v1/completions", "prompt", None),
        ("/v1/completions", "prompt", ["good", "a<image>b"]),
    ],
)
async def test_a_placeholder_without_an_image_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, media: FakeMedia, path: str, field: str, content: Any
) -> None:
    given = [5, media.placeholder, 6] if content is None else content
    response = await client.post(path, json={"model": "m", field: given})
    assert response.status_code == 422
    assert f"`{field}` has a token that stands for an image, <image>, and no image" in response.text
    assert not engine.requests


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
async def test_a_placeholder_that_a_chat_says_is_text(
    serve: Serve, engine: FakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch, role: str, is_special: bool
) -> None:
    """Whether the tokenizer calls it special or not, and with an image or without."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken(IMAGE, special=is_special)])
    tokenizer.save(str(model / "tokenizer.json"))
    media = FakeMedia(tokenizer.token_to_id(IMAGE))
    monkeypatch.setattr(MediaService, "create", lambda *_: media)
    said = {"role": role, "content": "an <image> and <image"} | ({"tool_call_id": "c"} if role == "tool" else {})
    ask = {"role": "user", "content": "What?"}
    async with serve(engine) as client:
        for count in (0, 1):
            content = [image_url(PNG)] * count + [text("?")]
            messages = [{"role": "user", "content": content}, said, ask]
            response = await client.post("/v1/chat/completions", json=openai() | {"messages": messages})
            assert response.status_code == 200, response.text
            assert engine.requests[-1].input_ids.count(media.placeholder) == 5 * count
            assert len(engine.requests[-1].media) == count


async def test_the_service_of_media_ends_with_the_server(serve: Serve, engine: FakeEngine, media: FakeMedia) -> None:
    async with serve(engine):
        assert not media.is_closed
    assert media.is_closed
    assert media.kinds == {MediaKind.IMAGE}


async def test_real_images_of_a_real_processor(tmp_path: Path, serve: Serve, engine: FakeEngine) -> None:
    """Qwen2-VL's processor: an image of 56 x 84 pixels has 2 x 3 merged patches."""
    folder = tmp_path / "qwen"
    folder.mkdir()
    ORACLES["qwen2-vl"].write(folder)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    config = {"chat_template": BOTH.replace("<image>", mark)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    file = BytesIO()
    Image.new("RGB", (84, 56), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    async with serve(engine, tokenizer_name=str(folder)) as client:
        response = await client.post("/v1/chat/completions", json=openai(image_url(url), text(mark), image_url(url)))
        assert response.status_code == 200, response.text
        response = await client.post("/v1/chat/completions", json=openai(image_url(url.replace("PNG", "PDF", 1)[:-40])))
        assert response.status_code == 422
    placeholder = TOKENIZER.token_to_id("<|image_pad|>")
    request = engine.requests[-1]
    first, second = request.media
    assert first.input.key == second.input.key
    assert (first.span.length, first.span.grid, first.input.num_features) == (6, (1, 2, 3), 6)
    assert all(set(request.input_ids[each.span.position : each.span.end]) == {placeholder} for each in request.media)
    assert request.input_ids.count(placeholder) == 12
