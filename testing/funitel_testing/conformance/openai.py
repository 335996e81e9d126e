"""Rows of OpenAI's routes: contract 6. Where TGI departs from OpenAI's meaning, OpenAI's clients are followed."""

from typing import Any

from funitel_testing.conformance.rows import ABSENT, DONE, Matches, Row

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
_OBJECT = "TGI's error is a string, OpenAI's an object, which its clients read"


def chat(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    """A body of the chat route."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3} | fields


def completion(prompt: Any = "Hello", **fields: Any) -> dict[str, Any]:
    """A body of the completions route."""
    return {"prompt": prompt, "max_tokens": 3} | fields


def _chat(
    section: str, claim: str, answer: dict[str, Any] | None = None, differs: str | None = None, /, **fields: Any
) -> Row:
    body = fields.pop("body", None) or chat(**({"temperature": 0} | fields))
    return Row(
        section=section,
        claim=claim,
        path=CHAT_PATH,
        body=body,
        answer=answer or {"object": "chat.completion"},
        differs=differs,
    )


def _no_chat(
    section: str, claim: str, *says: str, error_type: str = "validation", body: Any = None, **fields: Any
) -> Row:
    return Row(
        section=section,
        claim=claim,
        path=CHAT_PATH,
        body=chat(**fields) if body is None else body,
        status=422,
        error_type=error_type,
        answer={"error.message": str, "error.type": "invalid_request_error"},
        says=says,
        differs=_OBJECT,
    )


def _completes(claim: str, answer: dict[str, Any], differs: str | None = None, /, **fields: Any) -> Row:
    body = completion(**({"temperature": 0} | fields))
    return Row(section="6.2", claim=claim, path=COMPLETIONS_PATH, body=body, answer=answer, differs=differs)


def _count(number: int) -> Any:
    return lambda value: isinstance(value, list) and len(value) == number


_PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
_FUNCTION = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
_CALLED = {
    "choices.0.finish_reason": "tool_calls",
    "choices.0.message.tool_calls.0.type": "function",
    "choices.0.message.tool_calls.0.function.name": "f",
    "choices.0.message.tool_calls.0.function.arguments": Matches(r'\s*\{\s*"a"\s*:\s*[12]\s*\}\s*'),
    "choices.0.message.tool_calls.0.id": Matches(r".{4,}"),
}
_SCHEMA = _FUNCTION["function"]["parameters"]  # type: ignore[index]
_JSON_CONTENT = {"choices.0.message.content": Matches(r'\s*\{\s*"a"\s*:\s*[12]\s*\}\s*')}

CHATS = (
    _chat(
        "6.6",
        "a whole answer",
        {
            "object": "chat.completion",
            "created": int,
            "system_fingerprint": Matches(r".+-native"),
            "choices": _count(1),
            "choices.0.index": 0,
            "choices.0.message.role": "assistant",
            "choices.0.message.content": str,
            "choices.0.logprobs": None,
            "choices.0.finish_reason": "length",
            "usage.completion_tokens": 3,
            "usage.prompt_tokens": 21,
            "usage.total_tokens": 24,
        },
        ignore_eos=True,
    ),
    _chat("6.6", "an id of its own", {"id": Matches("chatcmpl-.{8,}")}, "TGI's is empty"),
    _chat("6.6", "the model is echoed", {"model": "mine"}, model="mine"),
    _chat("6.6", "tgi is the served model", {"model": lambda name: name not in ("tgi", "")}, model="tgi"),
    _chat(
        "6.6",
        "logprobs",
        {
            "choices.0.logprobs.content": lambda tokens: 1 <= len(tokens) <= 3,
            "choices.0.logprobs.content.0.logprob": float,
            "choices.0.logprobs.content.0.top_logprobs": _count(2),
        },
        logprobs=True,
        top_logprobs=2,
        logit_bias={"32": 50, "33": 50},
    ),
    _chat("6.1", "temperature 0 is greedy", temperature=0.0),
    _chat("6.1", "top_p", top_p=0.9, temperature=1),
    _chat("6.1", "top_p 1.0 is off", None, "TGI refuses 1.0 (its issue 2222)", top_p=1.0),
    _chat("6.1", "stop as a string", None, "TGI takes arrays only", stop="x"),
    _chat("6.1", "stop as an array", stop=["x", "y"]),
    _chat("6.1", "seed", seed=5, temperature=1),
    _chat("6.1", "frequency_penalty", frequency_penalty=1.5),
    _chat(
        "6.1",
        "presence_penalty has OpenAI's meaning",
        None,
        "TGI turns x into a repetition penalty of x + 2",
        presence_penalty=-2.0,
    ),
    _chat(
        "6.1",
        "logit_bias as a map",
        {"choices.0.message.content": "AAA"},
        "TGI refuses maps and ignores lists",
        logit_bias={"32": 100},
    ),
    _chat("6.1", "n answers", {"choices": _count(2), "choices.1.index": 1}, "TGI ignores n", n=2),
    _chat("6.1", "max_completion_tokens", {"usage.completion_tokens": 2}, max_completion_tokens=2, ignore_eos=True),
    _chat(
        "6.1",
        "user, metadata and the like are taken",
        user="u",
        metadata={},
        service_tier="auto",
        parallel_tool_calls=True,
    ),
    _chat("6.3", "parts of text are joined", {"usage.prompt_tokens": 21}, content=_PARTS),
    _chat(
        "6.3", "a name is taken", body={"messages": [{"role": "user", "content": "Hi", "name": "Ann"}], "max_tokens": 2}
    ),
    _chat(
        "6.3",
        "control tokens in a content are text",
        {"usage.prompt_tokens": len("[user] <|end|>\n[assistant]")},
        "TGI's clients can end their message and write those of another role",
        content="<|end|>",
    ),
    _chat(
        "6.3",
        "a final assistant message is continued",
        {"usage.prompt_tokens": len("[user] Hi\n[assistant] So")},
        body={
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}],
            "max_tokens": 2,
        },
    ),
    _chat(
        "6.4",
        "tool_choice required",
        _CALLED,
        "TGI's finish_reason is stop and its id 0",
        tools=[_FUNCTION],
        tool_choice="required",
        max_tokens=120,
    ),
    _chat(
        "6.4",
        "tool_choice by name",
        _CALLED,
        "TGI's finish_reason is stop and its id 0",
        tools=[_FUNCTION],
        tool_choice={"type": "function", "function": {"name": "f"}},
        max_tokens=120,
    ),
    _chat(
        "6.4",
        "tool_choice as a bare name",
        _CALLED,
        "TGI's finish_reason is stop and its id 0",
        tools=[_FUNCTION],
        tool_choice="f",
        max_tokens=120,
    ),
    _chat("6.4", "tool_choice none", {"choices.0.message.tool_calls": ABSENT}, tools=[_FUNCTION], tool_choice="none"),
    _chat(
        "6.4",
        "tool_choice auto lets the model answer",
        {"choices.0.message.content": str},
        tools=[_FUNCTION],
        tool_choice="auto",
    ),
    _chat("6.4", "no tools", {"choices.0.message.content": str}, tools=[]),
    _chat("6.5", "TGI's json", _JSON_CONTENT, response_format={"type": "json", "value": _SCHEMA}, max_tokens=60),
    _chat(
        "6.5",
        "TGI's json_object with a value",
        _JSON_CONTENT,
        response_format={"type": "json_object", "value": _SCHEMA},
        max_tokens=60,
    ),
    _chat(
        "6.5",
        "TGI's json_schema",
        _JSON_CONTENT,
        response_format={"type": "json_schema", "value": {"schema": _SCHEMA}},
        max_tokens=60,
    ),
    _chat(
        "6.5",
        "TGI's regex",
        {"choices.0.message.content": "abc"},
        response_format={"type": "regex", "value": "abc"},
        max_tokens=20,
    ),
    _chat(
        "6.5",
        "OpenAI's json_schema",
        _JSON_CONTENT,
        "TGI refuses OpenAI's shape (its issue 2899)",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}},
        max_tokens=60,
    ),
    _chat("6.5", "OpenAI's text", None, "TGI refuses OpenAI's shape", response_format={"type": "text"}),
    Row(
        section="6.6",
        claim="a stream",
        path=CHAT_PATH,
        body=chat(stream=True, temperature=0, ignore_eos=True),
        answer={
            "0.object": "chat.completion.chunk",
            "0.choices.0.delta.role": "assistant",
            "0.choices.0.finish_reason": None,
            "0.usage": None,
            "-2.choices.0.finish_reason": "length",
            "-1": DONE,
        },
    ),
    Row(
        section="6.6",
        claim="the role is in the first chunk alone",
        path=CHAT_PATH,
        body=chat(stream=True, temperature=0, ignore_eos=True),
        answer={"1.choices.0.delta.role": ABSENT},
        differs="TGI repeats it in every chunk",
    ),
    Row(
        section="6.6",
        claim="include_usage adds a chunk without choices",
        path=CHAT_PATH,
        body=chat(stream=True, stream_options={"include_usage": True}, ignore_eos=True),
        answer={"-2.choices": [], "-2.usage.completion_tokens": 3, "-3.usage": None, "-1": DONE},
    ),
    Row(
        section="6.8",
        claim="the stop is cut from the answer",
        path=CHAT_PATH,
        body=chat(response_format={"type": "regex", "value": "aabbcc"}, stop=["bb"], max_tokens=20),
        answer={"choices.0.message.content": "aa", "choices.0.finish_reason": "stop"},
        differs="TGI's answer holds the stop, and its reason is stop_sequence",
    ),
    _no_chat("6.1", "no messages", "messages", body={"max_tokens": 2}),
    _no_chat("6.1", "top_logprobs over its bound", "20", logprobs=True, top_logprobs=21),
    _no_chat("6.1", "five stops", "`stop` supports up to 4", stop=list("abcde")),
    _no_chat("6.1", "temperature negative", "temperature", temperature=-1),
    _no_chat("6.1", "top_p over 1", "top_p", top_p=1.5),
    _no_chat("6.1", "frequency_penalty over 2", "frequency_penalty", frequency_penalty=2.5),
    Row(section="6.1", claim="an unknown field is ignored", path=CHAT_PATH, body=chat(temprature=1)),
    Row(section="6.1", claim="null is unset", path=CHAT_PATH, body=chat(temperature=None, stop=None, n=None, foo=None)),
    _no_chat("6.1", "n 0", "n", n=0),
    _no_chat("5.4", "over the context", "<= 512", max_tokens=1000),
    _no_chat("6.3", "an image", "image_url", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
    Row(
        section="6.3",
        claim="a role that is none",
        path=CHAT_PATH,
        body={"messages": [{"role": "user</s>", "content": "Hi"}]},
        status=422,
        error_type="validation",
        says=("messages.0.role", "must be one of system, developer, user"),
        answer={"error.param": "messages.0.role"},
        differs="TGI takes any text, which a template writes between control tokens",
    ),
    _no_chat(
        "6.4",
        "an unknown tool by name",
        "nothing",
        error_type="tool_error",
        tools=[_FUNCTION],
        tool_choice={"type": "function", "function": {"name": "nothing"}},
    ),
    _no_chat(
        "6.4",
        "tools with response_format",
        "response_format",
        error_type="tool_error",
        tools=[_FUNCTION],
        response_format={"type": "regex", "value": "a"},
    ),
    Row(
        section="5.8",
        claim="a refused stream of a chat",
        path=CHAT_PATH,
        body=chat(stream=True, top_p=2),
        status=422,
        error_type="validation",
        answer={"error.param": "top_p"},
        differs="TGI's status is 200 with an event of the error",
    ),
)

COMPLETIONS = (
    _completes(
        "a whole answer",
        {
            "object": "text_completion",
            "choices": _count(1),
            "choices.0.index": 0,
            "choices.0.text": str,
            "choices.0.logprobs": None,
            "choices.0.finish_reason": lambda reason: reason in ("length", "stop"),
            "usage.prompt_tokens": 5,
            "model": str,
            "created": int,
            "system_fingerprint": str,
        },
    ),
    _completes("an id of its own", {"id": Matches(".{8,}")}, "TGI's is empty"),
    _completes(
        "several prompts, in order",
        {"choices": _count(2), "choices.0.index": 0, "choices.1.index": 1, "usage.prompt_tokens": 7},
        prompt=["Hello", "Hi"],
    ),
    _completes("repetition_penalty", {"choices": _count(1)}, repetition_penalty=1.2),
    _completes("frequency_penalty", {"choices": _count(1)}, frequency_penalty=0.5),
    _completes("seed", {"choices": _count(1)}, seed=4, temperature=1),
    _completes("stop as an array", {"choices": _count(1)}, stop=["x"]),
    _completes("stop as a string", {"choices": _count(1)}, "TGI takes arrays only", stop="x"),
    _completes("n answers", {"choices": _count(2)}, "TGI ignores n", n=2, temperature=1),
    _completes("echo", {"choices.0.text": Matches("Hello.*")}, "TGI ignores echo", echo=True),
    Row(
        section="6.2",
        claim="a stream ends with [DONE]",
        path=COMPLETIONS_PATH,
        body=completion(stream=True),
        answer={"0.object": "text_completion", "0.choices.0.text": str, "-1": DONE},
    ),
    Row(
        section="6.2",
        claim="the reason in a stream is OpenAI's",
        path=COMPLETIONS_PATH,
        body=completion(stream=True, stop=None, logit_bias={"256": 100}),
        answer={"-2.choices.0.finish_reason": "stop"},
        differs="TGI says eos_token, and an empty text before it",
    ),
    Row(
        section="6.2",
        claim="suffix",
        path=COMPLETIONS_PATH,
        body=completion(suffix="!"),
        status=422,
        error_type="suffix not supported",
        differs=_OBJECT,
    ),
    Row(
        section="6.2",
        claim="more prompts than --max-client-batch-size",
        path=COMPLETIONS_PATH,
        body=completion(["a"] * 5),
        status=422,
        error_type="batch size exceeded",
        says=("4", "5"),
        differs=_OBJECT,
    ),
    Row(
        section="6.2",
        claim="no prompt",
        path=COMPLETIONS_PATH,
        body={},
        status=422,
        error_type="validation",
        differs=_OBJECT,
    ),
    Row(
        section="6.2",
        claim="no prompts",
        path=COMPLETIONS_PATH,
        body=completion([]),
        status=422,
        error_type="validation",
        differs=_OBJECT,
    ),
)

OPENAI = CHATS + COMPLETIONS
