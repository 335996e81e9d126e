"""TGI's own Python client, as it is."""

import warnings

import pytest

from funitel_testing.servers import Server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the client's own: it is written for pydantic 1
    text_generation = pytest.importorskip("text_generation", reason="scripts/install.sh installs it")

# text-generation 0.7 calls what pydantic 2 has under another name.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:text_generation"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pydantic"),
]

QUESTION = "What is the capital of France?"
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def test_generate(server: Server) -> None:
    client = text_generation.Client(server.url, timeout=60)
    answer = client.generate(PROMPT, max_new_tokens=20)
    assert "Paris" in answer.generated_text
    assert answer.details.generated_tokens == len(answer.details.tokens)
    assert answer.details.seed is None
    stopped = client.generate("1, 2, 3, 4,", max_new_tokens=20, stop_sequences=["7"])
    assert stopped.generated_text.endswith("7")
    assert stopped.details.finish_reason.value == "stop_sequence"


def test_sampled(server: Server) -> None:
    client = text_generation.Client(server.url, timeout=60)
    wishes = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 3, "max_new_tokens": 10}
    answers = [client.generate(PROMPT, repetition_penalty=1.1, **wishes) for _ in range(2)]
    assert answers[0].generated_text == answers[1].generated_text
    assert answers[0].details.seed == 3
    best = client.generate(PROMPT, do_sample=True, best_of=2, max_new_tokens=5, return_full_text=True)
    assert best.generated_text.startswith(PROMPT)
    assert len(best.details.best_of_sequences) == 1


def test_streamed(server: Server) -> None:
    client = text_generation.Client(server.url, timeout=60)
    whole = client.generate(PROMPT, max_new_tokens=20)
    responses = list(client.generate_stream(PROMPT, max_new_tokens=20))
    assert [response.token.id for response in responses] == [token.id for token in whole.details.tokens]
    assert "".join(r.token.text for r in responses if not r.token.special) == whole.generated_text
    assert [response.generated_text for response in responses[:-1]] == [None] * (len(responses) - 1)
    assert responses[-1].generated_text == whole.generated_text
    assert responses[-1].details.generated_tokens == len(responses)


def test_chat(server: Server) -> None:
    client = text_generation.Client(server.url, timeout=60)
    messages = [text_generation.types.Message(role="user", content=QUESTION)]
    answer = client.chat(messages=messages, temperature=0.01, max_tokens=20)
    assert "Paris" in answer.choices[0].message.content
    # Its streamed chat wants `tool_calls` in every chunk, which TGI did not send either.


def test_errors(server: Server) -> None:
    client = text_generation.Client(server.url, timeout=60)
    with pytest.raises(text_generation.errors.ValidationError, match="must have less than|must be <="):
        client.generate("word " * 9000, max_new_tokens=1)
    with pytest.raises(text_generation.errors.ValidationError, match="must be <="):
        list(client.generate_stream("word " * 9000, max_new_tokens=1))


async def test_async(server: Server) -> None:
    client = text_generation.AsyncClient(server.url, timeout=60)
    answer = await client.generate(PROMPT, max_new_tokens=20)
    assert "Paris" in answer.generated_text
    responses = [response async for response in client.generate_stream(PROMPT, max_new_tokens=20)]
    assert responses[-1].generated_text == answer.generated_text
