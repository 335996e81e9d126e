"""The public clients of TGI and of OpenAI work as they are."""

import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.servers import Server, serving

openai = pytest.importorskip("openai", reason="install the extra `clients`")
huggingface_hub = pytest.importorskip("huggingface_hub", reason="install the extra `clients`")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the client's own: it is written for pydantic 1
    text_generation = pytest.importorskip("text_generation", reason="scripts/install.sh installs it")

# text-generation 0.7 calls what pydantic 2 has under another name; huggingface_hub names its own future removals.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:text_generation"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pydantic"),
]

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, one shard."""
    flags = ("--model-id", MODEL, "--dtype", "float32", "--max-batch-total-tokens", "8192")
    with serving(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()


# openai -----------------------------------------------------------------------------------------------------


@pytest.fixture
def openai_client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_openai_client(server: Server) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat(openai_client: Any) -> None:
    answer = openai_client.chat.completions.create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=30)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert answer.model == MODEL
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 30


def test_openai_chat_streamed(openai_client: Any) -> None:
    whole = openai_client.chat.completions.create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=30)
    options = {"include_usage": True}
    stream = openai_client.chat.completions.create(
        model="tgi", messages=MESSAGES, temperature=0, max_tokens=30, stream=True, stream_options=options
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len([chunk for chunk in chunks if chunk.choices]) > 3, "it came in one piece"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage


def test_openai_sampling_and_logprobs(openai_client: Any) -> None:
    wishes = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 12, "frequency_penalty": 0.1}
    answers = [
        openai_client.chat.completions.create(
            model="tgi", messages=MESSAGES, logprobs=True, top_logprobs=2, stop=["\n"], **wishes
        )
        for _ in range(2)
    ]
    first, second = (answer.choices[0] for answer in answers)
    assert first.message.content == second.message.content
    assert "".join(entry.token for entry in first.logprobs.content) == first.message.content
    assert all(1 <= len(entry.top_logprobs) <= 2 for entry in first.logprobs.content)


def test_openai_stream_left_early(openai_client: Any, server: Server) -> None:
    with openai_client.chat.completions.create(
        model="tgi", messages=MESSAGES, temperature=0, max_tokens=400, stream=True
    ) as stream:
        next(iter(stream))
    answer = openai_client.chat.completions.create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_openai_models(openai_client: Any) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]


def test_openai_errors(openai_client: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        openai_client.chat.completions.create(model="tgi", messages=[])
    assert caught.value.param == "messages"
    assert "Input validation error" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        openai_client.files.list()


async def test_openai_async(async_openai_client: Any) -> None:
    create = async_openai_client.chat.completions.create
    answer = await create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=30)
    assert "Paris" in answer.choices[0].message.content
    stream = await create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=30, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == answer.choices[0].message.content


# text-generation --------------------------------------------------------------------------------------------


def test_text_generation(server: Server) -> None:
    client = text_generation.Client(server.url, timeout=60)
    answer = client.generate(PROMPT, max_new_tokens=20)
    assert "Paris" in answer.generated_text
    assert answer.details.generated_tokens == len(answer.details.tokens)
    assert answer.details.seed is None
    stopped = client.generate("1, 2, 3, 4,", max_new_tokens=20, stop_sequences=["7"])
    assert stopped.generated_text.endswith("7")
    assert stopped.details.finish_reason.value == "stop_sequence"


def test_text_generation_sampled(server: Server) -> None:
    client = text_generation.Client(server.url, timeout=60)
    wishes = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 3, "max_new_tokens": 10}
    answers = [client.generate(PROMPT, repetition_penalty=1.1, **wishes) for _ in range(2)]
    assert answers[0].generated_text == answers[1].generated_text
    assert answers[0].details.seed == 3
    best = client.generate(PROMPT, do_sample=True, best_of=2, max_new_tokens=5, return_full_text=True)
    assert best.generated_text.startswith(PROMPT)
    assert len(best.details.best_of_sequences) == 1


def test_text_generation_streamed(server: Server) -> None:
    client = text_generation.Client(server.url, timeout=60)
    whole = client.generate(PROMPT, max_new_tokens=20)
    responses = list(client.generate_stream(PROMPT, max_new_tokens=20))
    assert [response.token.id for response in responses] == [token.id for token in whole.details.tokens]
    assert "".join(r.token.text for r in responses if not r.token.special) == whole.generated_text
    assert [response.generated_text for response in responses[:-1]] == [None] * (len(responses) - 1)
    assert responses[-1].generated_text == whole.generated_text
    assert responses[-1].details.generated_tokens == len(responses)


def test_text_generation_chat(server: Server) -> None:
    client = text_generation.Client(server.url, timeout=60)
    messages = [text_generation.types.Message(role="user", content=QUESTION)]
    answer = client.chat(messages=messages, temperature=0.01, max_tokens=20)
    assert "Paris" in answer.choices[0].message.content
    # Its streamed chat wants `tool_calls` in every chunk, which TGI did not send either.


def _delta(chunk: Any) -> str:
    return chunk.choices[0].delta.content or ""


def test_text_generation_errors(server: Server) -> None:
    client = text_generation.Client(server.url, timeout=60)
    with pytest.raises(text_generation.errors.ValidationError, match="must have less than|must be <="):
        client.generate("word " * 9000, max_new_tokens=1)
    with pytest.raises(text_generation.errors.ValidationError, match="must be <="):
        list(client.generate_stream("word " * 9000, max_new_tokens=1))


async def test_text_generation_async(server: Server) -> None:
    client = text_generation.AsyncClient(server.url, timeout=60)
    answer = await client.generate(PROMPT, max_new_tokens=20)
    assert "Paris" in answer.generated_text
    responses = [response async for response in client.generate_stream(PROMPT, max_new_tokens=20)]
    assert responses[-1].generated_text == answer.generated_text


# huggingface_hub --------------------------------------------------------------------------------------------


@pytest.fixture(params=["base_url", "model"])
def hub_client(server: Server, request: pytest.FixtureRequest) -> Any:
    return huggingface_hub.InferenceClient(**{request.param: server.url}, timeout=60)


def test_hub_text_generation(hub_client: Any) -> None:
    if hub_client.model is None:
        pytest.skip("huggingface_hub takes `base_url` for chats only")
    text = hub_client.text_generation(PROMPT, max_new_tokens=20, return_full_text=False)
    assert "Paris" in text
    detailed = hub_client.text_generation(PROMPT, max_new_tokens=20, details=True, return_full_text=False)
    assert detailed.generated_text == text
    assert detailed.details.generated_tokens == len(detailed.details.tokens)
    pieces = list(hub_client.text_generation(PROMPT, max_new_tokens=20, stream=True))
    assert "".join(pieces).removesuffix("<|im_end|>") == text
    *_, last = hub_client.text_generation(PROMPT, max_new_tokens=20, stream=True, details=True, return_full_text=False)
    assert last.generated_text == text
    assert last.details.generated_tokens == detailed.details.generated_tokens
    assert last.details.finish_reason == detailed.details.finish_reason


def test_hub_text_generation_with_every_parameter(hub_client: Any) -> None:
    if hub_client.model is None:
        pytest.skip("huggingface_hub takes `base_url` for chats only")
    answer = hub_client.text_generation(
        PROMPT,
        details=True,
        best_of=1,
        do_sample=True,
        frequency_penalty=0.1,
        max_new_tokens=5,
        repetition_penalty=1.1,
        return_full_text=True,
        seed=1,
        stop=["zzz"],
        temperature=0.7,
        top_k=50,
        top_n_tokens=2,
        top_p=0.9,
        truncate=100,
        typical_p=0.9,
    )
    assert answer.generated_text.startswith(PROMPT)
    assert len(answer.details.top_tokens) == len(answer.details.tokens)


def test_hub_chat_completion(hub_client: Any) -> None:
    answer = hub_client.chat_completion(MESSAGES, temperature=0, max_tokens=30)
    content = answer.choices[0].message.content
    assert "Paris" in content
    chunks = list(hub_client.chat_completion(MESSAGES, temperature=0, max_tokens=30, stream=True))
    assert "".join(_delta(chunk) for chunk in chunks) == content
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    named = hub_client.chat.completions.create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=30)
    assert named.choices[0].message.content == content


def test_hub_errors(server: Server) -> None:
    client = huggingface_hub.InferenceClient(model=server.url, timeout=60)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as caught:
        client.chat_completion([], max_tokens=3)
    assert caught.value.response.status_code == 422
    with pytest.raises(Exception, match="must be <="):
        client.text_generation("word " * 9000, max_new_tokens=1)


async def test_hub_async(server: Server) -> None:
    async with huggingface_hub.AsyncInferenceClient(model=server.url, timeout=60) as client:
        text = await client.text_generation(PROMPT, max_new_tokens=20, return_full_text=False)
        assert "Paris" in text
        pieces = [piece async for piece in await client.text_generation(PROMPT, max_new_tokens=20, stream=True)]
        assert "".join(pieces).removesuffix("<|im_end|>") == text
        answer = await client.chat_completion(MESSAGES, temperature=0, max_tokens=30)
        assert "Paris" in answer.choices[0].message.content
