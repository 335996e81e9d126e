"""Whatever is wrong with a request or a chat template: an error that says what to change, and nothing breaks."""

import http.client
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.servers import PLAIN, Server, serving

LIMITS = ("--dtype", "float32", "--max-batch-total-tokens", "4096")
IN_USE = (
    'funitel_blocks{state="used"}',
    'funitel_sequences{state="running"}',
    'funitel_sequences{state="waiting"}',
    "funitel_cached_batches",
)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One tiny server that shall outlive every request below; at the end nothing runs on it."""
    with serving(tmp_path_factory.mktemp("server"), "--model-id", str(tiny_model), *LIMITS) as running:
        yield running
        answer = post(running, "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 3}})
        assert answer.status_code == 200
        assert answer.json()["generated_text"] is not None
        assert httpx.get(f"{running.url}/health").status_code == 200
        metrics = running.metrics()
        assert {name: metrics[name] for name in IN_USE} == dict.fromkeys(IN_USE, 0)
        assert "Traceback" not in running.log.read_text(), running.tail()
        assert running.process.poll() is None


def post(server: Server, path: str, body: Any, content_type: str | None = "application/json") -> httpx.Response:
    """POST a JSON value, or bytes as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if content_type is None else {"content-type": content_type}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=60, verify=PLAIN)


def generation(inputs: Any = "Hello", **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": {"max_new_tokens": 2} | parameters}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages) or [{"role": "user", "content": "Hi"}], "max_tokens": 2} | fields


def _assert_refused(response: httpx.Response, status: int, error_type: str, *words: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error", "error_type"}
    assert body["error_type"] == error_type
    error = body["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "\n" not in message
    assert "Traceback" not in message
    assert len(message) < 1000
    if error_type == "validation":
        assert message.startswith("Input validation error: ")
    for word in words:
        assert word in message, message


DEEP = b"[" * 100_000 + b"]" * 100_000

NOT_JSON: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"inputs": "Hel',
    "text": b"Hello",
    "two values": b'{"inputs": "a"} {"inputs": "b"}',
    "NaN": b'{"inputs": "a", "parameters": {"temperature": NaN}}',
    "Infinity": b'{"inputs": "a", "parameters": {"temperature": Infinity}}',
    "-Infinity": b'{"inputs": "a", "parameters": {"temperature": -Infinity}}',
    "invalid UTF-8": b'{"inputs": "\xff\xfe"}',
    "surrogate in UTF-8": b'{"inputs": "\xed\xa0\x80"}',
    "raw control character": b'{"inputs": "a\x00b"}',
    "deep nesting": DEEP,
    "deep nesting in a field": b'{"inputs": "a", "parameters": {"grammar": ' + DEEP + b"}}",
    "endless number": b'{"inputs": "a", "parameters": {"seed": ' + b"9" * 10_000 + b"}}",
}


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
@pytest.mark.parametrize("name", NOT_JSON)
def test_a_body_that_is_not_json(server: Server, path: str, name: str) -> None:
    _assert_refused(post(server, path, NOT_JSON[name]), 400, "validation")


WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a list": ([], ("object",)),
    "a string": ("Hello", ("object",)),
    "null": (None, ("object",)),
    "no inputs": ({"parameters": {}}, ("inputs", "required")),
    "inputs null": (generation(None), ("inputs",)),
    "inputs a number": (generation(5), ("inputs",)),
    "inputs a list": (generation(["a", "b"]), ("inputs",)),
    "inputs empty": (generation(""), ("`inputs` cannot be empty",)),
    "parameters a list": ({"inputs": "a", "parameters": []}, ("parameters",)),
    "lone surrogate": (b'{"inputs": "a\\ud800b"}', ("inputs", "surrogate")),
    "lone surrogate in a stop": (b'{"inputs": "a", "parameters": {"stop": ["\\udfff"]}}', ("stop", "surrogate")),
    "infinite float": (b'{"inputs": "a", "parameters": {"temperature": 1e999}}', ("temperature",)),
    "prompt too long": (generation("a" * 512), ("512", "`max_new_tokens`")),
    "prompt far too long": (generation("a" * 300_000), ("at least", "<= 512")),
    "max_new_tokens 0": (generation(max_new_tokens=0), ("`max_new_tokens` must be strictly positive",)),
    "max_new_tokens negative": (generation(max_new_tokens=-1), ("max_new_tokens",)),
    "max_new_tokens over the context": (generation(max_new_tokens=512), ("<= 512", "512 `max_new_tokens`")),
    "max_new_tokens huge": (generation(max_new_tokens=2**32 - 1), ("<= 512",)),
    "max_new_tokens over 32 bits": (generation(max_new_tokens=2**32), ("max_new_tokens",)),
    "max_new_tokens a string": (generation(max_new_tokens="5"), ("max_new_tokens",)),
    "max_new_tokens a fraction": (generation(max_new_tokens=1.5), ("max_new_tokens",)),
    "max_new_tokens a bool": (generation(max_new_tokens=True), ("max_new_tokens",)),
    "temperature 0": (generation(temperature=0), ("`temperature` must be strictly positive",)),
    "temperature negative": (generation(temperature=-1), ("`temperature`",)),
    "temperature too small for a float": (generation(temperature=1e-60), ("`temperature`",)),
    "top_p 0": (generation(top_p=0), ("`top_p` must be > 0.0 and < 1.0",)),
    "top_p 1": (generation(top_p=1), ("`top_p` must be > 0.0 and < 1.0",)),
    "typical_p 1": (generation(typical_p=1.0), ("`typical_p`",)),
    "top_k 0": (generation(top_k=0), ("`top_k` must be strictly positive",)),
    "repetition_penalty 0": (generation(repetition_penalty=0), ("`repetition_penalty`",)),
    "frequency_penalty 3": (generation(frequency_penalty=3), ("`frequency_penalty`",)),
    "truncate 0": (generation(truncate=0), ("`truncate`",)),
    "truncate over the limit": (generation(truncate=512), ("`truncate`", "511")),
    "five stops": (generation(stop=["a", "b", "c", "d", "e"]), ("`stop` supports up to 4", "5")),
    "empty stop": (generation(stop=[""]), ("`stop`",)),
    "stop of numbers": (generation(stop=[5]), ("stop",)),
    "best_of 3": (generation(best_of=3, do_sample=True), ("`best_of` must be > 0 and <= 2",)),
    "best_of 0": (generation(best_of=0), ("`best_of`",)),
    "best_of without sampling": (generation(best_of=2), ("you must use sampling when `best_of` is > 1",)),
    "best_of with seed": (generation(best_of=2, do_sample=True, seed=1), ("`seed` must not be set",)),
    "top_n_tokens 6": (generation(top_n_tokens=6), ("`top_n_tokens` must be >= 0 and <= 5",)),
    "seed negative": (generation(seed=-1), ("seed",)),
    "seed over 64 bits": (generation(seed=2**64), ("seed",)),
    "details a string": (generation(details="yes"), ("details",)),
    "grammar not a regex": (generation(grammar={"type": "regex", "value": "("}), ("grammar is not valid", "unclosed")),
    "grammar not a schema": (generation(grammar={"type": "json", "value": {"type": 5}}), ("grammar is not valid",)),
}


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request(server: Server, path: str, name: str) -> None:
    body, words = WRONG[name]
    if "best_of" in name and path == "/generate_stream":
        words = ("`best_of` != 1 is not supported when streaming tokens",)
    _assert_refused(post(server, path, body), 422, "validation", *words)


def test_prompt_details_are_not_streamed(server: Server) -> None:
    response = post(server, "/generate_stream", generation(decoder_input_details=True))
    _assert_refused(response, 422, "validation", "`decoder_input_details` == true is not supported when streaming")


WRONG_CHATS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no messages": ({"max_tokens": 2}, ("messages", "required")),
    "empty messages": ({"messages": []}, ("messages",)),
    "messages a string": ({"messages": "Hi"}, ("messages",)),
    "message a string": (chat("Hi"), ("messages.0",)),
    "no role": (chat({"content": "Hi"}), ("messages.0.role", "required")),
    "role a number": (chat({"role": 1, "content": "Hi"}), ("messages.0.role",)),
    "content a number": (chat({"role": "user", "content": 5}), ("messages.0.content",)),
    "content an image": (
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        ("messages.0.content.0.image_url", "image_url"),
    ),
    "lone surrogate": (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', ("messages.0.content",)),
    "max_tokens 0": (chat(max_tokens=0), ("max_tokens",)),
    "max_tokens negative": (chat(max_tokens=-5), ("max_tokens",)),
    "max_tokens over the context": (chat(max_tokens=1000), ("<= 512",)),
    "temperature negative": (chat(temperature=-0.1), ("temperature",)),
    "top_p 1.1": (chat(top_p=1.1), ("top_p",)),
    "top_logprobs without logprobs": (chat(top_logprobs=2), ("`logprobs`",)),
    "top_logprobs 21": (chat(logprobs=True, top_logprobs=21), ("20",)),
    "n 0": (chat(n=0), ("n: must be greater than or equal to 1", "0")),
    "n 129": (chat(n=129), ("n: must be less than or equal to 128", "129")),
    "a tool without a name": (
        chat(tools=[{"type": "function", "function": {}}]),
        ("tools.0.function.name", "required"),
    ),
    "tools a string": (chat(tools="f"), ("tools",)),
    "response_format of no kind": (chat(response_format={"type": "yaml"}), ("response_format", "yaml")),
    "logit_bias of an unknown token": (chat(logit_bias={"288": 1}), ("`logit_bias`", "288")),
    "a language of a model that has none": (chat(target_language="fra_Latn"), ("`target_language`", "no languages")),
    "logit_bias over 100": (chat(logit_bias={"5": 101}), ("logit_bias.5", "100", "101")),
    "five stops": (chat(stop=list("abcde")), ("`stop` supports up to 4",)),
    "stream_options without stream": (chat(stream_options={"include_usage": True}), ("`stream_options`",)),
    "chat too long": (chat({"role": "user", "content": "a" * 600}), ("512",)),
}


@pytest.mark.parametrize("name", WRONG_CHATS)
def test_a_wrong_chat(server: Server, name: str) -> None:
    body, words = WRONG_CHATS[name]
    response = post(server, "/v1/chat/completions", body)
    _assert_refused(response, 422, "validation", *words)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/tokenize", "/v1/chat/completions"])
def test_a_body_of_ten_megabytes(server: Server, path: str) -> None:
    body = b'{"inputs": "' + b"a" * 10_000_000 + b'"}'
    _assert_refused(post(server, path, body), 413, "validation", "2000000")


def test_a_body_of_ten_megabytes_without_a_declared_length(server: Server) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"inputs": "'
        for _ in range(100):
            yield b"a" * 100_000

    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/generate", content=pieces(), headers=headers, timeout=60, verify=PLAIN)
    _assert_refused(response, 413, "validation", "2000000")


def test_a10_a_chunk_of_2_to_the_63_bytes_is_refused_at_its_size(server: Server) -> None:
    for path in ("/generate", "/v1/chat/completions"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n8000000000000000\r\n".encode())
            answer = http.client.HTTPResponse(client)
            answer.begin()
            error = json.loads(answer.read())["error"]
        assert answer.status == 413
        assert "at most 2000000 bytes" in (error if path == "/generate" else error["message"])


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "json", ""])
def test_another_content_type(server: Server, content_type: str | None) -> None:
    _assert_refused(post(server, "/generate", generation(), content_type), 415, "validation", "application/json")


@pytest.mark.parametrize(
    ("method", "path", "status", "error_type"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/nowhere", 404, "not_found"),
        ("POST", "/generate/", 404, "not_found"),
        ("GET", "/%ff%00", 404, "not_found"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("PUT", "/generate", 405, "method_not_allowed"),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_an_unknown_route_or_method(server: Server, method: str, path: str, status: int, error_type: str) -> None:
    _assert_refused(httpx.request(method, f"{server.url}{path}"), status, error_type)


@pytest.mark.parametrize(
    "body",
    [
        generation("a\0b"),
        generation("\U0001f600" * 20),
        generation(max_new_tokens=None, truncate=5, stop=["\0"]),
        generation() | {"colour": "blue"},
        generation(colour="blue"),
        generation(temperature=1e30, do_sample=True),
        generation(temperature=1e-30, do_sample=True),
        generation(repetition_penalty=1e30),
        generation(top_k=2**31 - 1, do_sample=True),
        generation(seed=2**64 - 1, do_sample=True),
        generation(stop=None),
        generation("a" * 510),
        {"inputs": "a", "parameters": None},
    ],
    ids=range(13),
)
def test_unusual_but_right(server: Server, body: dict[str, Any]) -> None:
    response = post(server, "/generate", body)
    assert response.status_code == 200, response.text
    assert "generated_text" in response.json()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"GET\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: five\r\n\r\nabcde",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
    ],
    ids=["TLS", "no path", "negative length", "length in words", "endless header", "half a body"],
)
def test_bytes_that_are_no_request(server: Server, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(request_bytes)
        sock.shutdown(socket.SHUT_WR)
        try:
            answer = sock.recv(1 << 16)
        except ConnectionResetError:
            answer = b""
    assert b"Traceback" not in answer
    assert httpx.get(f"{server.url}/health").status_code == 200


# A model whose chat template cannot be used -----------------------------------------------------------------


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to give another chat template."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def _set_template(folder: Path, template: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def test_a_broken_chat_template_turns_off_chat_alone(copy: Path, tmp_path: Path) -> None:
    _set_template(copy, "{% for m in messages %}{{ m.role")
    with serving(tmp_path, "--model-id", str(copy), *LIMITS) as server:
        refused = post(server, "/v1/chat/completions", chat())
        _assert_refused(refused, 422, "template_error", "Template error: ", "not valid")
        assert post(server, "/generate", generation()).status_code == 200
        assert "Traceback" not in server.wait_log("chat is off")


def test_a_template_that_refuses_or_fails(copy: Path, tmp_path: Path) -> None:
    template = "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ nothing.here }}"
    _set_template(copy, template)
    with serving(tmp_path, "--model-id", str(copy), *LIMITS) as server:
        message = {"role": "user", "content": "Hi"}
        _assert_refused(
            post(server, "/v1/chat/completions", chat(message, message)), 422, "template_error", "one message only"
        )
        _assert_refused(post(server, "/v1/chat/completions", chat(message)), 422, "template_error", "nothing")
        assert "Traceback" not in server.log.read_text()


def test_b8_openais_errors_and_strict_fields(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "--model-id", str(tiny_model), "--openai-errors", "--strict-fields") as strict:
        for path, body, code in (
            ("/v1/chat/completions", chat(temprature=1), "unknown_parameter"),
            ("/v1/chat/completions", chat({"role": "user", "content": "Hi", "colour": 1}), "unknown_parameter"),
            ("/v1/completions", {"prompt": "Hi", "temperature": 2.5}, "decimal_above_max_value"),
            ("/v1/responses", {"input": "Hi", "max_output_tokens": 10_000}, "context_length_exceeded"),
        ):
            response = post(strict, path, body)
            assert response.status_code == 400, response.text
            assert response.json().keys() == {"error"}
            assert response.json()["error"]["code"] == code
        refused = post(strict, "/generate", {"inputs": "Hi", "made_up": 1})
        assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
