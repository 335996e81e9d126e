"""The Hugging Face hub's Python client, as it is."""

from typing import Any

import pytest

from funitel_testing.servers import Server

huggingface_hub = pytest.importorskip("huggingface_hub", reason="install the extra `clients`")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pydantic")

QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def _delta(chunk: Any) -> str:
    return chunk.choices[0].delta.content or ""


@pytest.fixture(params=["base_url", "model"])
def hub_client(server: Server, request: pytest.FixtureRequest) -> Any:
    return huggingface_hub.InferenceClient(**{request.param: server.url}, timeout=60)


def test_text_generation(hub_client: Any) -> None:
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


def test_text_generation_with_every_parameter(hub_client: Any) -> None:
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


def test_chat_completion(hub_client: Any) -> None:
    answer = hub_client.chat_completion(MESSAGES, temperature=0, max_tokens=30)
    content = answer.choices[0].message.content
    assert "Paris" in content
    chunks = list(hub_client.chat_completion(MESSAGES, temperature=0, max_tokens=30, stream=True))
    assert "".join(_delta(chunk) for chunk in chunks) == content
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    named = hub_client.chat.completions.create(model="tgi", messages=MESSAGES, temperature=0, max_tokens=30)
    assert named.choices[0].message.content == content


def test_errors(server: Server) -> None:
    client = huggingface_hub.InferenceClient(model=server.url, timeout=60)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as caught:
        client.chat_completion([], max_tokens=3)
    assert caught.value.response.status_code == 422
    with pytest.raises(Exception, match="must be <="):
        client.text_generation("word " * 9000, max_new_tokens=1)


async def test_async(server: Server) -> None:
    async with huggingface_hub.AsyncInferenceClient(model=server.url, timeout=60) as client:
        text = await client.text_generation(PROMPT, max_new_tokens=20, return_full_text=False)
        assert "Paris" in text
        pieces = [piece async for piece in await client.text_generation(PROMPT, max_new_tokens=20, stream=True)]
        assert "".join(pieces).removesuffix("<|im_end|>") == text
        answer = await client.chat_completion(MESSAGES, temperature=0, max_tokens=30)
        assert "Paris" in answer.choices[0].message.content


def test_b3_encoders_on_a_bare_url(encoder: Server) -> None:
    client = huggingface_hub.InferenceClient(model=encoder.url, timeout=60)
    one = client.feature_extraction("The sea is deep.")
    assert one.shape == (1, 384)
    assert float((one * one).sum()) == pytest.approx(1, abs=1e-5)
    wishes = {"normalize": False, "truncate": True, "truncation_direction": "left", "dimensions": 64}
    assert client.feature_extraction("sea " * 400, **wishes).shape == (1, 64)
    near, far = client.sentence_similarity("The sea is deep.", ["The ocean is deep.", "Birds fly over the house."])
    assert 1 >= near > 0.5 > far > -1
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="must have at most 256 tokens"):
        client.feature_extraction("sea " * 400)


async def test_b3_encoders_on_a_bare_url_async(encoder: Server) -> None:
    async with huggingface_hub.AsyncInferenceClient(model=encoder.url, timeout=60) as client:
        assert (await client.feature_extraction("The sea is deep.")).shape == (1, 384)
        assert await client.sentence_similarity("sea", ["sea"]) == [pytest.approx(1, abs=1e-5)]
