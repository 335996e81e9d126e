"""Rows of the native routes: contract 5.2 to 5.6, 8.4 to 8.6."""

from typing import Any

from funitel_testing.conformance.rows import ABSENT, Matches, Row

MAX_INPUT, MAX_TOTAL = 511, 512  # of the tiny model
LONG_TOTAL = 2048  # of the same with a longer context, on the server "long"
GENERATE, STREAM, ROOT = "/generate", "/generate_stream", "/"
VALIDATION = "Input validation error: "


def given(inputs: Any = "Hello", **parameters: Any) -> dict[str, Any]:
    """A body of a native route."""
    return {"inputs": inputs, "parameters": {"max_new_tokens": 3} | parameters}


def _accepts(section: str, claim: str, answer: dict[str, Any] | None = None, /, **parameters: Any) -> Row:
    body = given(**({"details": True} | parameters))
    return Row(section=section, claim=claim, path=GENERATE, body=body, answer=answer or {"generated_text": str})


def _refuses(
    section: str, claim: str, *says: str, path: str = GENERATE, inputs: Any = "Hello", **parameters: Any
) -> Row:
    return Row(
        section=section,
        claim=claim,
        path=path,
        body=given(inputs, **parameters),
        status=422,
        error_type="validation",
        says=(VALIDATION, *says),
    )


def _length(count: int) -> Any:
    return lambda value: isinstance(value, list) and len(value) == count


_LOGPROB = {"details.tokens.0.logprob": lambda value: isinstance(value, float) and value <= 0}

FIELDS = (
    Row(
        section="5.2",
        claim="inputs alone",
        path=GENERATE,
        body={"inputs": "Hello", "parameters": {"max_new_tokens": 2}},
    ),
    Row(
        section="5.2",
        claim="without parameters tokens are sampled, up to the context's end",
        path=GENERATE,
        body={"inputs": "a" * 500},
        answer={"generated_text": str, "details": ABSENT},
    ),
    _accepts("5.2", "with parameters do_sample is false", {"details.seed": None}),
    _accepts("5.2", "do_sample", {"details.seed": int}, do_sample=True),
    _accepts("5.2", "seed", {"details.seed": 42}, do_sample=True, seed=42),
    _accepts("5.2", "the greatest seed", {"details.seed": 2**64 - 1}, do_sample=True, seed=2**64 - 1),
    _accepts("5.2", "temperature turns sampling on", {"details.seed": int}, temperature=0.5),
    _accepts("8.1", "temperature 1.0 alone stays greedy", {"details.seed": None}, temperature=1.0),
    _accepts("5.2", "top_k turns sampling on", {"details.seed": int}, top_k=5),
    _accepts("5.2", "top_p turns sampling on", {"details.seed": int}, top_p=0.9),
    _accepts("5.2", "typical_p turns sampling on", {"details.seed": int}, typical_p=0.9),
    _accepts("5.2", "repetition_penalty", {"details.seed": None}, repetition_penalty=1.3),
    _accepts("5.2", "frequency_penalty at its least", {"details.seed": None}, frequency_penalty=-2.0),
    _accepts("5.2", "frequency_penalty at its most", {"details.seed": None}, frequency_penalty=2.0),
    _accepts("5.2", "an integer is a number", {"details.seed": int}, temperature=2),
    _accepts("5.2", "max_new_tokens", {"details.generated_tokens": 7}, max_new_tokens=7, ignore_eos_token=True),
    _accepts("5.2", "watermark", {"generated_text": str}, watermark=True),
    _accepts("5.2", "stop, unmatched", {"generated_text": str}, stop=["\x00\x01\x02"]),
    _accepts("5.2", "null is as absent", {"details.seed": None}, temperature=None, top_k=None, stop=None, seed=None),
    _accepts("5.2", "adapter_id null", {"generated_text": str}, adapter_id=None),
    _accepts("5.2", "grammar null", {"generated_text": str}, grammar=None),
    _accepts("5.2", "best_of 1", {"details.best_of_sequences": ABSENT}, best_of=1),
    _accepts(
        "5.3",
        "best_of 2 lists the other sequence",
        {"details.best_of_sequences": _length(1), "details.best_of_sequences.0.generated_text": str},
        best_of=2,
        do_sample=True,
    ),
    _accepts("5.2", "top_n_tokens 0 is off", {"details.top_tokens": ABSENT}, top_n_tokens=0),
    _accepts(
        "5.3",
        "top_n_tokens at its most",
        {"details.top_tokens": _length(3), "details.top_tokens.0": lambda tokens: len(tokens) >= 5},
        top_n_tokens=5,
        ignore_eos_token=True,
    ),
    _accepts(
        "5.3",
        "decoder_input_details lists the prompt; its first logprob is null",
        {
            "details.prefill": _length(5),
            "details.prefill.0": {"id": 39, "text": "H", "logprob": None},
            "details.prefill.1.logprob": float,
        },
        decoder_input_details=True,
    ),
    Row(
        section="5.2",
        claim="decoder_input_details implies details",
        path=GENERATE,
        body=given(decoder_input_details=True),
        answer={"details.prefill": _length(5)},
    ),
    _accepts(
        "5.2",
        "truncate keeps the last tokens",
        {"details.prefill": _length(2), "details.prefill.0.text": "l"},
        truncate=2,
        decoder_input_details=True,
    ),
    _accepts("5.2", "truncate at its most", {"generated_text": str}, truncate=MAX_INPUT),
    Row(
        section="5.2",
        claim="return_full_text",
        path=GENERATE,
        body=given(return_full_text=True),
        answer={"generated_text": Matches("Hello.*")},
    ),
    Row(
        section="5.2",
        claim="return_full_text is false by default",
        path=GENERATE,
        body=given(max_new_tokens=1, grammar=None),
        answer={"generated_text": lambda text: not text.startswith("Hello")},
    ),
    Row(
        section="5.2",
        claim="on / the prompt begins the text by default",
        path=ROOT,
        body=given(),
        answer={"0.generated_text": Matches("Hello.*")},
    ),
    Row(
        section="5.2",
        claim="on / return_full_text false",
        path=ROOT,
        body=given(return_full_text=False),
        answer={"0.generated_text": lambda text: not text.startswith("Hello")},
    ),
    Row(section="5.1", claim="unknown fields are ignored", path=GENERATE, body=given(stop_sequences=["a"]) | {"x": 1}),
)

RESPONSES = (
    _accepts(
        "5.3",
        "Details",
        {
            "details.finish_reason": "length",
            "details.generated_tokens": 3,
            "details.seed": None,
            "details.prefill": [],
            "details.tokens": _length(3),
            "details.best_of_sequences": ABSENT,
            "details.top_tokens": ABSENT,
        },
        ignore_eos_token=True,
    ),
    _accepts("5.3", "Token", {"details.tokens.0": lambda token: set(token) == {"id", "text", "logprob", "special"}}),
    _accepts("8.3", "logprobs are log-probabilities", _LOGPROB),
    Row(section="5.3", claim="no details unless asked", path=GENERATE, body=given(), answer={"details": ABSENT}),
    Row(section="5.3", claim="/ answers an array of one", path=ROOT, body=given(), answer={"": _length(1)}),
    Row(
        section="5.3",
        claim="StreamResponse",
        path=STREAM,
        body=given(ignore_eos_token=True),
        answer={
            "": _length(3),
            "0.index": 1,
            "2.index": 3,
            "0": lambda event: set(event) == {"index", "token", "generated_text", "details"},
            "0.generated_text": None,
            "0.details": None,
            "-1.generated_text": str,
            "-1.details": None,
        },
    ),
    Row(
        section="5.3",
        claim="StreamDetails in the last event if asked",
        path=STREAM,
        body=given(details=True, do_sample=True, seed=3, ignore_eos_token=True),
        answer={
            "-2.details": None,
            "-1.details": {"finish_reason": "length", "generated_tokens": 3, "seed": 3, "input_length": 5},
        },
    ),
    Row(
        section="5.3",
        claim="top_tokens of a stream",
        path=STREAM,
        body=given(top_n_tokens=2),
        answer={"0.top_tokens": lambda tokens: len(tokens) >= 2},
    ),
    Row(
        section="5.3",
        claim="/ streams by its flag",
        path=ROOT,
        body=given(ignore_eos_token=True) | {"stream": True},
        answer={"": _length(3), "-1.generated_text": Matches("Hello.*")},
    ),
    Row(
        section="5.3",
        claim="the text has no special tokens",
        path=GENERATE,
        body=given(),
        answer={"generated_text": lambda text: "<|end|>" not in text},
    ),
    _accepts(
        "8.4", "length wins at the limit", {"details.finish_reason": "length"}, max_new_tokens=1, ignore_eos_token=True
    ),
    _accepts(
        "8.4",
        "a stop string ends the text and stays in it",
        {"details.finish_reason": "stop_sequence", "generated_text": Matches("a+b")},
        grammar={"type": "regex", "value": "a{4}bcccccccc"},
        stop=["b"],
        max_new_tokens=12,
    ),
    _accepts(
        "8.4",
        "a stop string across tokens is found",
        {"details.finish_reason": "stop_sequence", "generated_text": "aabbc"},
        grammar={"type": "regex", "value": "aabbccdd"},
        stop=["bbc"],
        max_new_tokens=12,
    ),
    _accepts(
        "5.3",
        "the end token is the last, and special",
        {"details.finish_reason": "eos_token", "details.tokens.-1.special": True, "generated_text": "ab"},
        grammar={"type": "regex", "value": "ab"},
        max_new_tokens=12,
    ),
)


def _runs_long(claim: str, parameters: dict[str, Any], count: int, differs: str) -> Row:
    return Row(
        section="5.4",
        claim=claim,
        path=GENERATE,
        body=given(**({"details": True, "ignore_eos_token": True} | parameters)),
        answer={"details.generated_tokens": count, "details.finish_reason": "length"},
        server="long",
        differs=differs,
    )


_SLICES = "TGI generates in slices of 1024 tokens, each whole: up to 2048 tokens come back"
_CLAMPED = (
    "where 1024 tokens fit, as in TGI, but the answer ends with the context and not with a slice; `max_tokens`, "
    "`max_completion_tokens` and `max_output_tokens` alike"
)

LENGTHS = (
    _accepts(
        "5.4",
        "prompt and completion up to max_total_tokens",
        {"details.generated_tokens": 507},
        max_new_tokens=507,
        ignore_eos_token=True,
    ),
    _refuses(
        "5.4",
        "one more is refused",
        f"<= {MAX_TOTAL}",
        "5 `inputs` tokens and 508 `max_new_tokens`",
        max_new_tokens=508,
    ),
    Row(
        section="5.4",
        claim="unset max_new_tokens fills the context",
        path=GENERATE,
        body={"inputs": "a" * 500, "parameters": {"details": True, "ignore_eos_token": True}},
        answer={"details.generated_tokens": 12},
    ),
    _runs_long("an answer of 1500 tokens", {"max_new_tokens": 1500}, 1500, _SLICES),
    _runs_long("max_new_tokens over the context is clamped", {"max_new_tokens": 5000}, LONG_TOTAL - 5, _CLAMPED),
    _refuses(
        "5.4",
        "1024 and more are refused where 1024 do not fit",
        f"<= {MAX_TOTAL}",
        "5 `inputs` tokens and 5000 `max_new_tokens`",
        max_new_tokens=5000,
    ),
    _refuses("5.4", "the total is checked first", f"must be <= {MAX_TOTAL}", inputs="a" * 512),
    _accepts(
        "5.4", "a prompt of max_input_tokens", {"details.generated_tokens": 1}, inputs="a" * MAX_INPUT, max_new_tokens=1
    ),
    _accepts(
        "5.4",
        "a longer prompt is truncated if asked",
        {"details.generated_tokens": 1},
        inputs="a" * 2000,
        truncate=10,
        max_new_tokens=1,
    ),
)

_SHARE = "must be > 0.0 and < 1.0"

# What can be wrong, in the order TGI checks it.
VIOLATIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("best_of over its bound", {"best_of": 3}, "`best_of` must be > 0 and <= 2"),
    ("temperature 0", {"temperature": 0.0}, "`temperature` must be strictly positive"),
    ("repetition_penalty 0", {"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ("frequency_penalty 2.1", {"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("top_p 1.0", {"top_p": 1.0}, f"`top_p` {_SHARE}"),
    ("typical_p 1.0", {"typical_p": 1.0}, f"`typical_p` {_SHARE}"),
    ("top_k 0", {"top_k": 0}, "`top_k` must be strictly positive"),
    ("max_new_tokens 0", {"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ("five stops", {"stop": list("abcde")}, "`stop` supports up to 4 stop sequences"),
    ("seed with best_of", {"seed": 1, "best_of": 2, "do_sample": True}, "`seed` must not be set when `best_of` > 1"),
    ("top_n_tokens 6", {"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5"),
    ("empty inputs", {"inputs": ""}, "`inputs` cannot be empty"),
    ("truncate 0", {"truncate": 0}, f"`truncate` must be strictly positive and less than {MAX_INPUT}"),
    ("too long", {"max_new_tokens": 512}, f"`inputs` tokens + `max_new_tokens` must be <= {MAX_TOTAL}"),
    ("bad grammar", {"grammar": {"type": "json", "value": {"type": "object"}}}, "grammar is not valid"),
)


def _from(first: int) -> dict[str, Any]:
    """Everything wrong from one violation on; the earlier one wins where two concern the same field."""
    wrong: dict[str, Any] = {}
    for _, parameters, _ in reversed(VIOLATIONS[first:]):
        wrong |= parameters
    return wrong


ORDER = tuple(
    _refuses("5.2", f"{name} is found before what comes after it", message, **_from(place))
    for place, (name, _, message) in enumerate(VIOLATIONS)
)

CATALOGUE = (
    *(_refuses("5.6", name, message, **parameters) for name, parameters, message in VIOLATIONS),
    _refuses("5.6", "best_of 0", "`best_of` must be > 0 and <= 2", best_of=0),
    _refuses("5.6", "best_of needs sampling", "you must use sampling when `best_of` is > 1", best_of=2),
    _refuses(
        "5.6",
        "best_of in a stream",
        "`best_of` != 1 is not supported when streaming",
        path=STREAM,
        best_of=2,
        do_sample=True,
    ),
    _refuses(
        "5.6",
        "prompt details in a stream",
        "`decoder_input_details` == true is not supported when streaming",
        path=STREAM,
        decoder_input_details=True,
    ),
    _refuses("5.6", "temperature negative", "`temperature` must be strictly positive", temperature=-1),
    _refuses("5.6", "top_p 0", f"`top_p` {_SHARE}", top_p=0.0),
    _refuses("5.6", "typical_p 0", f"`typical_p` {_SHARE}", typical_p=0.0),
    _refuses("5.6", "top_k negative", "`top_k` must be strictly positive", top_k=-3),
    _refuses("5.6", "frequency_penalty -2.1", "`frequency_penalty` must be >= -2.0 and <= 2.0", frequency_penalty=-2.1),
    _refuses(
        "5.6",
        "truncate over max_input_tokens",
        f"`truncate` must be strictly positive and less than {MAX_INPUT}",
        truncate=MAX_INPUT + 1,
    ),
    *(
        Row(
            section="5.2",
            claim=f"{name} of another type",
            path=GENERATE,
            body=given(**{name: value}),
            status=422,
            error_type="validation",
            says=(VALIDATION, name),
        )
        for name, value in (
            ("best_of", "1"),
            ("temperature", "hot"),
            ("repetition_penalty", [1]),
            ("frequency_penalty", "0"),
            ("top_k", 1.5),
            ("top_p", "0.5"),
            ("typical_p", {}),
            ("do_sample", "yes"),
            ("max_new_tokens", 1.5),
            ("max_new_tokens", -1),
            ("return_full_text", 1),
            ("stop", [1]),
            ("truncate", "5"),
            ("watermark", 1),
            ("details", "true"),
            ("decoder_input_details", 0),
            ("seed", -1),
            ("seed", 2**64),
            ("top_n_tokens", "2"),
            ("grammar", "a+"),
            ("adapter_id", 5),
        )
    ),
    Row(
        section="5.2",
        claim="an unknown adapter is refused",
        path=GENERATE,
        body=given(adapter_id="mine"),
        status=422,
        error_type="validation",
        says=("`adapter_id`", "mine"),
        differs="TGI silently answers with the base model",
    ),
    Row(
        section="5.2",
        claim="stop may be one string",
        path=GENERATE,
        body=given(stop="x"),
        differs="TGI takes arrays only; clients send both",
    ),
)

_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def _grammar(claim: str, kind: str, value: Any, pattern: str) -> Row:
    body = given(grammar={"type": kind, "value": value}, max_new_tokens=60)
    return Row(section="5.5", claim=claim, path=GENERATE, body=body, answer={"generated_text": Matches(pattern)})


_JSON = r'\s*\{\s*"a"\s*:\s*[12]\s*\}\s*'

GRAMMARS = (
    _grammar("json", "json", _SCHEMA, _JSON),
    _grammar("json_object is json", "json_object", _SCHEMA, _JSON),
    _grammar(
        "a schema as text",
        "json",
        '{"properties": {"a": {"const": 1}}, "required": ["a"], "type": "object", "additionalProperties": false}',
        _JSON,
    ),
    _grammar("json_schema", "json_schema", {"name": "x", "schema": _SCHEMA}, _JSON),
    _grammar(
        "json_schema without a name, other keys ignored", "json_schema", {"schema": _SCHEMA, "strict": True}, _JSON
    ),
    _grammar("regex", "regex", "(yes|no){2}", "(yes|no){2}"),
    Row(
        section="5.5",
        claim="in a stream",
        path=STREAM,
        body=given(grammar={"type": "regex", "value": "abc"}, max_new_tokens=9),
        answer={"-1.generated_text": "abc"},
    ),
    *(
        _refuses("5.5", claim, "grammar", grammar=value)
        for claim, value in (
            ("a schema without properties", {"type": "json", "value": {"type": "object"}}),
            ("a schema that is none", {"type": "json", "value": {"type": "nothing", "properties": {}}}),
            ("text that is no JSON", {"type": "json", "value": "{"}),
            ("json of another type", {"type": "json", "value": 5}),
            ("a regex that is none", {"type": "regex", "value": "(a"}),
            ("a regex of another type", {"type": "regex", "value": 5}),
            ("json_schema without a schema", {"type": "json_schema", "value": {"name": "x"}}),
            ("an unknown type", {"type": "ebnf", "value": "a"}),
            ("no type", {"value": "a"}),
            ("no value", {"type": "regex"}),
        )
    ),
    Row(
        section="5.5",
        claim="switched off",
        path=GENERATE,
        body=given(grammar={"type": "regex", "value": "a"}),
        headers={"authorization": "Bearer secret"},
        status=422,
        error_type="validation",
        says=("rammar",),
        server="guarded",
    ),
)

ADDITIVE = (
    _accepts("-", "min_p", {"details.seed": int}, min_p=0.1),
    _accepts("-", "logit_bias", {"generated_text": "AAA"}, logit_bias={"32": 100}),
    _accepts("-", "ignore_eos", {"details.generated_tokens": 9}, ignore_eos=True, max_new_tokens=9),
    _refuses("-", "min_p over 1", "`min_p` must be >= 0.0 and <= 1.0", min_p=1.1),
    _refuses("-", "logit_bias of an unknown token", "`logit_bias`", "288", logit_bias={"288": 1}),
)

NATIVE = FIELDS + RESPONSES + LENGTHS + ORDER + CATALOGUE + GRAMMARS + ADDITIVE
