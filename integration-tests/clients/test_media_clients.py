"""Public clients as they are, with pictures and sounds: what comes back is what transformers makes of them."""

import base64
import io
import json
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from funitel_testing import npm
from funitel_testing.servers import Server, serving
from funitel_testing.sound_files import flac, wav
from funitel_testing.vision_models import VisionOracle, picture, save_vision
from funitel_testing.vision_requests import content_of, data_url
from funitel_testing.whisper_models import LANGUAGE_NAMES, WhisperOracle, save_tiny_whisper, sound

openai = pytest.importorskip("openai", reason="install the extra `clients`")
anthropic = pytest.importorskip("anthropic", reason="install the extra `clients`")
huggingface_hub = pytest.importorskip("huggingface_hub", reason="install the extra `clients`")
langchain_openai = pytest.importorskip("langchain_openai", reason="install the extra `clients`")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the client's own: it is written for pydantic 1
    text_generation = pytest.importorskip("text_generation", reason="scripts/install.sh installs it")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:text_generation"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pydantic"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of how huggingface_hub posts bytes
    pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning"),  # OpenAI's client says so of its translations
]

SCRIPTS = Path(__file__).parent / "npm"
LIMITS = ("--dtype", "float32", "--max-batch-total-tokens", "8192", "--max-input-tokens", "2000", "--max-total-tokens")
QUESTION = "What is this? "
MAX_TOKENS = 8
PICTURE, OTHER = picture(60, 45), picture(33, 90, 1)
SHORT, LONG = sound(4, 0), sound(47, 2)
ELSEWHERE = "http://127.0.0.1:9/a.png"
GREEDY = {"extra_body": {"temperature": 0}}  # Anthropic's client names it no longer


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small LLaVA."""
    return save_vision("llava", tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def seeing(seeing_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of it, which fetches nothing."""
    with serving(tmp_path_factory.mktemp("server"), "--model-id", str(seeing_model), *LIMITS, "2500") as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()


class Expected:
    """What the small LLaVA says, by transformers."""

    def __init__(self, model: Path) -> None:
        self._oracle = VisionOracle("llava", model)
        self.marker = self._oracle.row.marker

    def prompt(self, *parts: Any) -> str:
        """The prompt of a chat of one message."""
        words = "".join(part if isinstance(part, str) else self.marker for part in parts)
        return f"[user] {words}\n[assistant]"

    def text(self, prompt: str, *pictures: Any) -> str:
        """The answer without special tokens."""
        ids = self._oracle.generate(prompt, list(pictures), MAX_TOKENS)
        found: str = self._oracle.tokenizer.decode(ids, skip_special_tokens=True)
        return found

    def count(self, prompt: str, *pictures: Any) -> int:
        """Tokens of a prompt."""
        count: int = self._oracle.inputs(prompt, list(pictures))["input_ids"].shape[1]
        return count


@pytest.fixture(scope="module")
def expected(seeing_model: Path) -> Expected:
    return Expected(seeing_model)


@pytest.fixture(scope="module")
def hearing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Whisper."""
    return save_tiny_whisper(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def hearing(hearing_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of it."""
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, "--model-id", str(hearing_model), "--dtype", "float32") as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()


@pytest.fixture(scope="module")
def oracle_of(hearing_model: Path) -> WhisperOracle:
    return WhisperOracle(hearing_model)


# OpenAI's client --------------------------------------------------------------------------------------------------


@pytest.fixture
def openai_client(seeing: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("detail", [None, "low", "high", "auto"])
def test_openai_chat(detail: str | None, openai_client: Any, expected: Expected) -> None:
    url = {"url": data_url(PICTURE)} | ({} if detail is None else {"detail": detail})
    content = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": url}]
    fields = {"model": "any", "messages": [{"role": "user", "content": content}], "temperature": 0}
    answer = openai_client.chat.completions.create(**fields, max_tokens=MAX_TOKENS)
    prompt = expected.prompt(QUESTION, PICTURE)
    assert answer.choices[0].message.content == expected.text(prompt, PICTURE)
    assert answer.usage.prompt_tokens == expected.count(prompt, PICTURE)


def test_openai_chat_with_a_url_as_string(openai_client: Any, expected: Expected) -> None:
    """Not in OpenAI's description, but many send it."""
    content = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": data_url(PICTURE)}]
    messages: Any = [{"role": "user", "content": content}]
    answer = openai_client.chat.completions.create(model="any", messages=messages, temperature=0, max_tokens=MAX_TOKENS)
    assert answer.choices[0].message.content == expected.text(expected.prompt(QUESTION, PICTURE), PICTURE)


def test_openai_chat_with_several_pictures_streamed(openai_client: Any, expected: Expected) -> None:
    parts = (QUESTION, PICTURE, " and this? ", OTHER, PICTURE)
    prompt, pictures = expected.prompt(*parts), (PICTURE, OTHER, PICTURE)
    fields = {"model": "any", "messages": [{"role": "user", "content": content_of(parts)}], "temperature": 0}
    fields |= {"max_tokens": MAX_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(openai_client.chat.completions.create(**fields))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected.text(prompt, *pictures)
    assert chunks[-1].usage.prompt_tokens == expected.count(prompt, *pictures)


def test_openai_chat_of_several_turns(openai_client: Any, expected: Expected) -> None:
    messages: list[Any] = [
        {"role": "user", "content": content_of([QUESTION, PICTURE])},
        {"role": "assistant", "content": "A picture."},
        {"role": "user", "content": content_of(["And ", OTHER])},
    ]
    answer = openai_client.chat.completions.create(model="any", messages=messages, temperature=0, max_tokens=MAX_TOKENS)
    prompt = f"[user] {QUESTION}{expected.marker}\n[assistant] A picture.\n[user] And {expected.marker}\n[assistant]"
    assert answer.choices[0].message.content == expected.text(prompt, PICTURE, OTHER)


def test_openai_responses(openai_client: Any, expected: Expected) -> None:
    content = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": data_url(PICTURE), "detail": "auto"},
    ]
    fields: dict[str, Any] = {"model": "any", "input": [{"role": "user", "content": content}], "temperature": 0}
    fields["max_output_tokens"] = MAX_TOKENS
    answer = openai_client.responses.create(**fields)
    prompt = expected.prompt(QUESTION, PICTURE)
    assert answer.output_text == expected.text(prompt, PICTURE)
    assert answer.usage.input_tokens == expected.count(prompt, PICTURE)
    events = list(openai_client.responses.create(**fields, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text
    counted = openai_client.responses.input_tokens.count(model="any", input=fields["input"])
    assert counted.input_tokens == answer.usage.input_tokens
    items = list(openai_client.responses.input_items.list(answer.id))
    assert items[0].content[1].type == "input_image"
    following = fields | {"input": "And now?", "previous_response_id": answer.id}
    assert openai_client.responses.create(**following).usage.input_tokens > answer.usage.input_tokens


def test_openai_errors(openai_client: Any) -> None:
    for url in (ELSEWHERE, "data:image/png;base64,AAAA", "nonsense"):
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError), match="image") as caught:
            openai_client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": [part]}], max_tokens=2
            )
        assert "\n" not in caught.value.message
        image = {"type": "input_image", "image_url": url, "detail": "auto"}
        with pytest.raises(openai.BadRequestError, match="image|input"):
            openai_client.responses.create(model="any", input=[{"role": "user", "content": [image]}])
    with pytest.raises(openai.APIStatusError, match="model|audio|transcri"):
        openai_client.audio.transcriptions.create(model="any", file=("a.wav", wav(SHORT)))


@pytest.fixture
def audio_client(hearing: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0) as client:
        yield client.audio


def test_openai_transcriptions(audio_client: Any, oracle_of: WhisperOracle) -> None:
    create = audio_client.transcriptions.create
    heard = oracle_of.hear(SHORT, is_timed=False)
    assert create(model="whisper-1", file=("a.wav", wav(SHORT))).text.strip() == heard.text.strip()
    assert create(model="whisper-1", file=("a.flac", flac(SHORT))).text.strip() == heard.text.strip()
    german = oracle_of.hear(SHORT, language="de", is_timed=False)
    assert create(model="any", file=("a.wav", wav(SHORT)), language="de").text.strip() == german.text.strip()
    opened = io.BytesIO(wav(SHORT))
    opened.name = "a.wav"
    plain = create(model="whisper-1", file=opened, response_format="text", temperature=0)
    assert plain.strip() == heard.text.strip()


def test_openai_transcriptions_with_times(audio_client: Any, oracle_of: WhisperOracle) -> None:
    create = audio_client.transcriptions.create
    heard, file = oracle_of.hear(LONG), ("a.wav", wav(LONG))
    verbose = create(model="any", file=file, response_format="verbose_json", timestamp_granularities=["segment"])
    assert verbose.text.strip() == heard.text.strip()
    assert verbose.language in (heard.language, LANGUAGE_NAMES[heard.language])
    assert float(verbose.duration) == pytest.approx(47, abs=0.1)
    texts = [segment.text.strip() for segment in verbose.segments if segment.text.strip()]
    assert texts == [text.strip() for _, _, text in heard.segments if text.strip()]
    srt = create(model="any", file=file, response_format="srt")
    assert srt.startswith("1\n00:00:")
    assert all(text in srt for text in texts)
    assert create(model="any", file=file, response_format="vtt").startswith("WEBVTT")


def test_openai_transcriptions_streamed(audio_client: Any) -> None:
    for samples, least in ((SHORT, 4), (LONG, 2)):  # pieces: tokens, or segments of a sound of several windows
        file = ("a.wav", wav(samples))
        whole = audio_client.transcriptions.create(model="any", file=file).text
        events = list(audio_client.transcriptions.create(model="any", file=file, stream=True))
        deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
        assert len(deltas) >= least, "it came in one piece"
        assert events[-1].type == "transcript.text.done"
        assert "".join(deltas).strip() == events[-1].text.strip() == whole.strip()


def test_openai_translations(audio_client: Any, oracle_of: WhisperOracle) -> None:
    heard = oracle_of.hear(SHORT, task="translate", is_timed=False)
    file = ("a.wav", wav(SHORT))
    assert audio_client.translations.create(model="any", file=file).text.strip() == heard.text.strip()
    verbose = audio_client.translations.create(model="any", file=file, response_format="verbose_json")
    assert verbose.segments


def test_openai_audio_errors(audio_client: Any) -> None:
    with pytest.raises(openai.APIStatusError, match="file") as caught:
        audio_client.transcriptions.create(model="any", file=("a.wav", b"no sound"))
    assert 400 <= caught.value.status_code < 500
    with pytest.raises(openai.APIStatusError, match="language"):
        audio_client.transcriptions.create(model="any", file=("a.wav", wav(SHORT)), language="tlh")


# Anthropic's client -----------------------------------------------------------------------------------------------


@pytest.fixture
def anthropic_client(seeing: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0) as client:
        yield client


def _block(image: Any, **source: str) -> dict[str, Any]:
    data = data_url(image).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data} | source}


def _prompt_tokens(message: Any) -> int:
    tokens: int = message.usage.input_tokens + message.usage.cache_read_input_tokens
    return tokens


def test_anthropic_messages(anthropic_client: Any, expected: Expected) -> None:
    content = [_block(PICTURE), {"type": "text", "text": QUESTION}]
    messages: list[Any] = [{"role": "user", "content": content}]
    fields = {"model": "any", "max_tokens": MAX_TOKENS, "messages": messages, **GREEDY}
    message = anthropic_client.messages.create(**fields)
    prompt = expected.prompt(PICTURE, QUESTION)
    assert "".join(block.text for block in message.content) == expected.text(prompt, PICTURE)
    assert _prompt_tokens(message) == expected.count(prompt, PICTURE)
    with anthropic_client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == expected.text(prompt, PICTURE)
        assert _prompt_tokens(stream.get_final_message()) == expected.count(prompt, PICTURE)


def test_anthropic_counts_pictures(anthropic_client: Any, expected: Expected) -> None:
    content = [_block(PICTURE), _block(OTHER), {"type": "text", "text": QUESTION}]
    counted = anthropic_client.messages.count_tokens(model="any", messages=[{"role": "user", "content": content}])
    assert counted.input_tokens == expected.count(expected.prompt(PICTURE, OTHER, QUESTION), PICTURE, OTHER)


def test_anthropic_refuses_urls_while_nothing_is_fetched(anthropic_client: Any) -> None:
    image = {"type": "image", "source": {"type": "url", "url": ELSEWHERE}}
    with pytest.raises(anthropic.BadRequestError, match="image|source") as caught:
        anthropic_client.messages.create(model="any", max_tokens=2, messages=[{"role": "user", "content": [image]}])
    assert caught.value.type == "invalid_request_error"
    assert "\n" not in caught.value.api_message


def test_anthropic_tool_results_hold_pictures(anthropic_client: Any) -> None:
    """A picture in a tool's result counts as one elsewhere does, and changes the answer."""
    tool: Any = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}

    def ask(*content: Any) -> Any:
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [*content]}
        messages: list[Any] = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        fields = {"model": "any", "messages": messages, "tools": [tool]}
        counted = anthropic_client.messages.count_tokens(**fields).input_tokens
        message = anthropic_client.messages.create(**fields, max_tokens=MAX_TOKENS, **GREEDY)
        assert _prompt_tokens(message) == counted
        return message

    text = {"type": "text", "text": "Seen: "}
    without, one, other = ask(text), ask(text, _block(PICTURE)), ask(text, _block(OTHER))
    assert _prompt_tokens(one) == _prompt_tokens(other) == _prompt_tokens(without) + 16
    assert one.content != other.content


def test_anthropic_errors(anthropic_client: Any) -> None:
    for source in ({"data": "@@@@"}, {"data": ""}, {"media_type": "image/svg+xml"}):
        with pytest.raises(anthropic.BadRequestError, match="image|source"):
            anthropic_client.messages.create(
                model="any", max_tokens=2, messages=[{"role": "user", "content": [_block(PICTURE, **source)]}]
            )


# Hugging Face's clients -------------------------------------------------------------------------------------------


def test_huggingface_hub_chat(seeing: Server, expected: Expected) -> None:
    client = huggingface_hub.InferenceClient(model=seeing.url, timeout=60)
    messages: list[Any] = [{"role": "user", "content": content_of([QUESTION, PICTURE])}]
    answer = client.chat_completion(messages, temperature=0, max_tokens=MAX_TOKENS)
    prompt = expected.prompt(QUESTION, PICTURE)
    assert answer.choices[0].message.content == expected.text(prompt, PICTURE)
    assert answer.usage.prompt_tokens == expected.count(prompt, PICTURE)
    chunks = list(client.chat_completion(messages, temperature=0, max_tokens=MAX_TOKENS, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text(
        prompt, PICTURE
    )


def test_huggingface_hub_speech(hearing: Server, oracle_of: WhisperOracle, tmp_path: Path) -> None:
    client = huggingface_hub.InferenceClient(model=hearing.url, timeout=120)
    heard = oracle_of.hear(SHORT, is_timed=False)
    assert client.automatic_speech_recognition(wav(SHORT)).text.strip() == heard.text.strip()
    file = tmp_path / "a.flac"
    file.write_bytes(flac(SHORT))
    assert client.automatic_speech_recognition(str(file)).text.strip() == heard.text.strip()
    timed = client.automatic_speech_recognition(wav(LONG), extra_body={"return_timestamps": True})
    long = oracle_of.hear(LONG)
    assert timed.text.strip() == long.text.strip()
    assert [chunk.text.strip() for chunk in timed.chunks if chunk.text.strip()] == [
        text.strip() for _, _, text in long.segments if text.strip()
    ]
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as caught:
        client.automatic_speech_recognition(b"no sound at all")
    assert 400 <= caught.value.response.status_code < 500


async def test_huggingface_hub_async(seeing: Server, hearing: Server, expected: Expected) -> None:
    async with huggingface_hub.AsyncInferenceClient(model=seeing.url, timeout=60) as client:
        messages: list[Any] = [{"role": "user", "content": content_of([QUESTION, PICTURE])}]
        answer = await client.chat_completion(messages, temperature=0, max_tokens=MAX_TOKENS)
        assert answer.choices[0].message.content == expected.text(expected.prompt(QUESTION, PICTURE), PICTURE)
    async with huggingface_hub.AsyncInferenceClient(model=hearing.url, timeout=120) as client:
        assert (await client.automatic_speech_recognition(wav(SHORT))).text.strip()


def test_text_generation_with_markdown(seeing: Server, expected: Expected) -> None:
    client = text_generation.Client(seeing.url, timeout=60)
    inputs = f"See ![]({data_url(PICTURE)}) and ![]({data_url(OTHER)}) well"
    text = expected.text(f"See {expected.marker} and {expected.marker} well", PICTURE, OTHER)
    answer = client.generate(inputs, max_new_tokens=MAX_TOKENS)
    assert answer.generated_text == text
    responses = list(client.generate_stream(inputs, max_new_tokens=MAX_TOKENS))
    assert [response.token.id for response in responses] == [token.id for token in answer.details.tokens]
    assert responses[-1].generated_text == text
    with pytest.raises(text_generation.errors.ValidationError, match="image|inputs"):
        client.generate("See ![](data:image/png;base64,AAAA)", max_new_tokens=2)


# LangChain --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(responses: bool, seeing: Server, expected: Expected) -> None:
    fields = {"base_url": f"{seeing.url}/v1", "api_key": "none", "max_retries": 0, "model": "any", "temperature": 0}
    chat = langchain_openai.ChatOpenAI(**fields, max_tokens=MAX_TOKENS, use_responses_api=responses)
    data = data_url(PICTURE).partition(",")[2]
    forms: list[Any] = [
        {"type": "image_url", "image_url": {"url": data_url(PICTURE)}},
        {"type": "image", "base64": data, "mime_type": "image/png"},
        {"type": "image", "source_type": "base64", "data": data, "mime_type": "image/png"},
    ]
    text = expected.text(expected.prompt(QUESTION, PICTURE), PICTURE)
    for form in forms:
        message = {"role": "user", "content": [{"type": "text", "text": QUESTION}, form]}
        assert chat.invoke([message]).text == text, form["type"]
        assert "".join(chunk.text for chunk in chat.stream([message])) == text


# npm --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts and the packages they use."""
    return npm.install(SCRIPTS, tmp_path_factory.mktemp("npm") / "clients")


def _run(packages: Path, script: str, *args: str) -> Any:
    done = subprocess.run(["node", script, *args], cwd=packages, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_npm_ai_with_pictures(packages: Path, seeing: Server, expected: Expected, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(base64.b64decode(data_url(PICTURE).partition(",")[2]))
    got = _run(packages, "media.mjs", seeing.url, str(file))
    prompt = expected.prompt(QUESTION, PICTURE)
    text = expected.text(prompt, PICTURE)
    assert (got["text"], got["address"], got["streamed"]) == (text, text, text)
    assert got["inputTokens"] == expected.count(prompt, PICTURE)
    assert got["two"] == got["inputTokens"] + 16
    status, message = got["broken"]
    assert status in (400, 422), message


def test_npm_with_sounds(packages: Path, hearing: Server, oracle_of: WhisperOracle, tmp_path: Path) -> None:
    """Of a sound longer than a window, so that its text is the same with and without times."""
    file = tmp_path / "a.wav"
    file.write_bytes(wav(LONG))
    got = _run(packages, "sound.mjs", hearing.url, str(file))
    heard = oracle_of.hear(LONG)
    for name in ("openai", "verbose", "streamed"):
        assert got[name].strip() == heard.text.strip(), name
    assert got["translated"].strip() == oracle_of.hear(LONG, task="translate").text.strip()
    assert got["ai"]["text"].strip() == heard.text.strip()
    assert len(got["ai"]["segments"]) >= len([text for _, _, text in heard.segments if text.strip()])
    assert float(got["ai"]["seconds"]) == pytest.approx(47, abs=0.1)
