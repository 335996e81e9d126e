"""OpenAI's format of a batch's files: check the lines of an input, write the lines of an output or an error file."""

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from funitel.proto.errors import FunitelError, MalformedBody, PayloadTooLarge
from funitel.proto.printable import shortened
from funitel.router.batch.records import BatchError, BatchRequest, RequestResult
from funitel.router.core.text_bytes import check_text_bytes

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
MAX_ERRORS = 100  # that are reported of one file
MAX_CUSTOM_ID = 512  # characters
MAX_SHOWN = 80
EXPIRED = "batch_expired"
# Checking JSON holds the interpreter: the event loop gets it after so many lines, or bytes.
_LINES_A_TURN, _BYTES_A_TURN, _TURN_SECONDS = 16, 1 << 16, 0.001

CheckModel = Callable[[str], str | None]  # says why a model may not be asked for


@dataclass(frozen=True, slots=True)
class InputRules:
    """What the lines of an input file must be.

    Attributes:
        endpoint: the URL of every request.
        max_requests: maximum of requests.
        max_line_bytes: maximum size of a line.
        check_model: says why a model may not be asked for.
    """

    endpoint: str
    max_requests: int
    max_line_bytes: int
    check_model: CheckModel


@dataclass(slots=True)
class InputCheck:
    """What was found in an input file so far."""

    errors: list[BatchError] = field(default_factory=list)
    num_requests: int = 0


def check_input(path: Path, rules: InputRules, check: InputCheck) -> Iterator[BatchRequest]:
    """Yield the valid requests of an input file, and note errors in `check`. Blocks, but for other threads.

    Raises:
        OSError: the file cannot be read.
    """
    seen: dict[str, int] = {}
    offset = num_bytes = num_lines = 0
    with path.open("rb") as file:
        for line in _lines(file, rules.max_line_bytes):
            num_lines += 1
            num_bytes += line.length
            if num_lines % _LINES_A_TURN == 0 or num_bytes > _BYTES_A_TURN:
                num_bytes = 0
                time.sleep(_TURN_SECONDS)
            offset, begun = offset + line.length, offset
            if not line.content.strip():
                continue
            check.num_requests += 1
            if check.num_requests > rules.max_requests:
                words = f"a batch has at most {rules.max_requests} requests (--max-batch-requests)"
                check.errors.append(BatchError("too_many_tasks", words, line.number))
                return
            found = _check_line(line, rules, seen)
            if isinstance(found, BatchError):
                check.errors.append(found)
                if len(check.errors) >= MAX_ERRORS:
                    return
            else:
                seen[found] = line.number
                yield BatchRequest(line.number, found, begun, line.length)
    if not check.num_requests:
        check.errors.append(BatchError("empty_file", "the input file has no requests"))


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    content: bytes
    length: int


def _lines(file: Any, max_bytes: int) -> Iterator[_Line]:
    """The lines of a file; of one that is too long only the beginning is kept."""
    number = 0
    while content := file.readline(max_bytes + 2):
        number += 1
        length = len(content)
        if not content.endswith(b"\n"):
            while rest := file.readline(1 << 20):
                length += len(rest)
                if rest.endswith(b"\n"):
                    break
        yield _Line(number, content, length)


def _check_line(line: _Line, rules: InputRules, seen: dict[str, int]) -> str | BatchError:
    """The custom id of the request on a line, or what is wrong there."""

    def wrong(code: str, message: str, param: str | None = None) -> BatchError:
        return BatchError(code, shortened(message, 400), line.number, param)

    if line.length - line.content.endswith(b"\n") > rules.max_line_bytes:
        return wrong("request_too_large", f"a line has at most {rules.max_line_bytes} bytes. Given: {line.length}")
    try:
        check_text_bytes(line.content, rules.max_line_bytes)
        request = parse_object(line.content)
    except PayloadTooLarge as error:
        return wrong("request_too_large", error.message)
    except MalformedBody as error:
        return wrong("invalid_json_line", error.message)
    custom_id = request.get("custom_id")
    if custom_id is None:
        return wrong("missing_custom_id", "`custom_id` is required", "custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        words = f"`custom_id` must be a string of 1 to {MAX_CUSTOM_ID} characters. Given: {_shown(custom_id)}"
        return wrong("invalid_custom_id", words, "custom_id")
    if not custom_id.isascii() and any("\ud800" <= each <= "\udfff" for each in custom_id):
        words = f"`custom_id` must be valid Unicode, without lone surrogates. Given: {_shown(custom_id)}"
        return wrong("invalid_custom_id", words, "custom_id")
    if custom_id in seen:
        words = f"`custom_id` must be unique, line {seen[custom_id]} has it too. Given: {_shown(custom_id)}"
        return wrong("duplicate_custom_id", words, "custom_id")
    if request.get("method") != "POST":
        return wrong("invalid_method", f"`method` must be POST. Given: {_shown(request.get('method'))}", "method")
    if request.get("url") != rules.endpoint:
        words = f"`url` must be {rules.endpoint}, the endpoint of the batch. Given: {_shown(request.get('url'))}"
        return wrong("invalid_url", words, "url")
    body = request.get("body")
    if not isinstance(body, dict):
        return wrong("invalid_body", f"`body` must be an object. Given: {_shown(body)}", "body")
    for name in ("stream", "background"):
        if body.get(name):
            return wrong("unsupported_parameter", f"`{name}` is not supported in a batch", f"body.{name}")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        return wrong("invalid_model", f"`model` must be a string. Given: {_shown(model)}", "body.model")
    refusal = None if model is None else rules.check_model(model)
    return custom_id if refusal is None else wrong("model_not_found", refusal, "body.model")


def parse_object(content: bytes) -> dict[str, Any]:
    """Read a line of JSON that is an object; raises MalformedBody."""
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MalformedBody(f"the line is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise MalformedBody("the line is nested too deeply") from None
    except ValueError as error:
        raise MalformedBody(f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedBody(f"the line must be an object. Given: {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=True), MAX_SHOWN)


# Results ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What a route answered to a request: `body` is JSON, `retry_after` in seconds where it asked for patience."""

    status: int
    body: bytes
    request_id: str
    retry_after: float | None = None

    @property
    def is_success(self) -> bool:
        """Whether it belongs in the output file."""
        return 200 <= self.status < 300


def new_id(kind: str) -> str:
    """An id of OpenAI's form, such as `batch_...`."""
    return f"{kind}{uuid.uuid4().hex}"


def answer_line(request: BatchRequest, answer: BatchAnswer) -> RequestResult:
    """The line of a request that was answered."""
    # The body is JSON already: it is put in as it is, which takes no time whatever its size.
    head = {"id": new_id("batch_req_"), "custom_id": request.custom_id}
    response = json.dumps({"status_code": answer.status, "request_id": answer.request_id})
    start = json.dumps(head)[:-1].encode()
    content = b"".join((start, b', "response": ', response[:-1].encode(), b', "body": ', answer.body, b"}"))
    return RequestResult(request.line, request.custom_id, answer.is_success, content + b', "error": null}')


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that was not run."""
    error = {"code": code, "message": message}
    line = {"id": new_id("batch_req_"), "custom_id": custom_id, "response": None, "error": error}
    return json.dumps(line).encode()


def internal_answer(error: FunitelError, request_id: str) -> BatchAnswer:
    """The answer of a request where its route failed without one."""
    body = {"error": {"message": error.public_message, "type": "server_error", "param": None, "code": error.error_type}}
    return BatchAnswer(500, json.dumps(body).encode(), request_id)
