"""Our OpenAPI document says all that TGI's says: what was written for TGI works here, with the exceptions listed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from openapi_superset import differences

from funitel.router.api.openapi import MEANINGS
from funitel.router.api.routes import OPERATIONS, document
from funitel.router.middleware.operation import ModelUse

TGI: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "tgi-openapi.json").read_text())

_REFUSED_TOO = "TGI refuses these values when it checks the request; its document does not say so"
_NO_404 = "documented by TGI and never sent (contract 5.12, 5.13): a failure is 422 or 503"
_REAL_STATUS = "errors before the first token have their status and a JSON body; later ones are events (contract 5.8)"
_LIST = "TGI's document gives one model, TGI and we answer a list (contract 5.12)"
_32_BITS = "numbers beyond 32 bits are refused when the body is read, far above every limit"

# Where a client of TGI's document may stumble on purpose, and why.
DELIBERATE = {
    "GenerateParameters.best_of": _32_BITS,
    "GenerateParameters.frequency_penalty": _REFUSED_TOO,
    "GenerateParameters.max_new_tokens": _REFUSED_TOO,
    "GenerateParameters.top_p": _REFUSED_TOO,
    "GenerateParameters.typical_p": _REFUSED_TOO,
    "GenerateParameters.truncate": f"{_REFUSED_TOO}; {_32_BITS}",
    "POST /tokenize 200 application/json": "vLLM's bodies are answered with its object, TGI's with TGI's array",
    "POST /generate_stream 422 text/event-stream": _REAL_STATUS,
    "POST /generate_stream 424 text/event-stream": _REAL_STATUS,
    "POST /generate_stream 429 text/event-stream": _REAL_STATUS,
    "POST /generate_stream 500 text/event-stream": _REAL_STATUS,
    "ChatRequest.max_tokens": _REFUSED_TOO,
    "ChatRequest.messages": "a chat without messages has no prompt",
    "TextMessage.content": "null beside tool calls, as OpenAI's",
    "TextMessage.role": "always sent; its default is documented",
    "TextMessage.tool_call_id": "of messages sent; TGI's answers never carry it",
    "ErrorResponse.error": "OpenAI's object on its routes (contract 6.8), its text within",
    "ModelInfo.created": _LIST,
    "ModelInfo.id": _LIST,
    "ModelInfo.owned_by": _LIST,
    "GET /v1/models": _NO_404,
    "POST /invocations 200 application/json": "an array, as on / (contract 5.12); TGI's document says an object",
    "Prompt": "an empty list has no prompt; TGI refuses it too (contract 6.2)",
    **dict.fromkeys(
        ("BestOfSequence.finish_reason", "Details.finish_reason", "StreamDetails.finish_reason"),
        "`abort` of a request that DELETE /v1/requests/{id} ended",
    ),
    "CompletionComplete.finish_reason": "null until a stream's text ends, as OpenAI's (contract 6.8)",
    "CompletionComplete.logprobs": "OpenAI's object; TGI's are always null (contract 6.2)",
    "ChatRequest.logit_bias": "OpenAI's map; TGI documents a list and ignores it (contract 6.1)",
    "ChatRequest.n": "honoured, so bounded; TGI ignores it",
    "FunctionDefinition.arguments": "a schema is an object; TGI takes anything and puts its text before the model",
}


def test_the_document_is_a_superset_of_tgis() -> None:
    found = differences(TGI, document(), TGI["paths"])
    unexpected = {where: notes for where, notes in found.items() if where not in DELIBERATE}
    assert unexpected == {}
    assert found.keys() == DELIBERATE.keys(), "a listed difference is gone"


def test_the_real_bounds_are_documented() -> None:
    properties = document()["components"]["schemas"]["GenerateParameters"]["properties"]
    bounds = {
        "best_of": {"exclusiveMinimum": 0},
        "temperature": {"exclusiveMinimum": 0},
        "repetition_penalty": {"exclusiveMinimum": 0},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "top_k": {"exclusiveMinimum": 0},
        "top_p": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "typical_p": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "max_new_tokens": {"exclusiveMinimum": 0},
        "truncate": {"exclusiveMinimum": 0},
        "seed": {"minimum": 0, "maximum": 2**64 - 1},
    }
    for name, expected in bounds.items():
        value = properties[name]["anyOf"][0]
        assert {key: value[key] for key in expected} == expected, name


SPOILED = {
    "a path": (lambda doc: doc["paths"].pop("/info"), "GET /info", "is no route"),
    "a status": (lambda doc: doc["paths"]["/generate"]["post"]["responses"].pop("424"), "POST /generate", "424"),
    "a field": (
        lambda doc: doc["components"]["schemas"]["GenerateParameters"]["properties"].pop("watermark"),
        "GenerateParameters.watermark",
        "is missing",
    ),
    "a type": (
        lambda doc: doc["components"]["schemas"]["GenerateParameters"]["properties"]["details"].update(type="string"),
        "GenerateParameters.details",
        "string instead of boolean",
    ),
    "a bound": (
        lambda doc: doc["components"]["schemas"]["GenerateParameters"]["properties"]["seed"].update(
            anyOf=[{"type": "integer", "minimum": 1, "maximum": 10}, {"type": "null"}]
        ),
        "GenerateParameters.seed",
        "must be at most 10",
    ),
    "a requirement": (
        lambda doc: doc["components"]["schemas"]["GenerateRequest"]["required"].append("parameters"),
        "GenerateRequest.parameters",
        "is required",
    ),
    "an answer's field": (
        lambda doc: doc["components"]["schemas"]["Details"]["required"].remove("prefill"),
        "Details.prefill",
        "may be absent",
    ),
    "an enum": (
        lambda doc: doc["components"]["schemas"]["Details"]["properties"]["finish_reason"]["enum"].append("stop"),
        "Details.finish_reason",
        "stop",
    ),
    "a nullable answer": (
        lambda doc: doc["components"]["schemas"]["GenerateResponse"]["properties"].update(
            generated_text={"type": ["string", "null"], "anyOf": [{"type": "string"}, {"type": "null"}]}
        ),
        "GenerateResponse.generated_text",
        "null",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_the_comparison_sees(name: str) -> None:
    spoil, where, what = SPOILED[name]
    doc = copy.deepcopy(document())
    spoil(doc)  # type: ignore[no-untyped-call]
    found = differences(TGI, doc, TGI["paths"])
    assert any(what in note for note in found.get(where, [])), found


def test_every_status_is_documented_and_none_else() -> None:
    for operation in OPERATIONS:
        responses = document()["paths"][operation.documented_path][operation.method.lower()]["responses"]
        expected = {"200", *map(str, operation.failures), *(["401", "403", "429"] if operation.is_protected else [])}
        expected |= set() if operation.model is ModelUse.NONE else {"404", "503", "507"}
        assert responses.keys() == expected
        assert set(operation.failures) <= MEANINGS.keys()
    names = [operation["operationId"] for path in document()["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ("GenerateParameters", "max_new_tokens"),
        ("ChatRequest", "max_tokens"),
        ("ChatRequest", "max_completion_tokens"),
        ("CompletionRequest", "max_tokens"),
        ("ResponsesRequest", "max_output_tokens"),
        ("MessagesRequest", "max_tokens"),
    ],
)
def test_a11_the_document_says_what_becomes_of_more_tokens_than_the_context_has(schema: str, field: str) -> None:
    described = document()["components"]["schemas"][schema]["properties"][field]["description"]
    assert "from 1024 on it is accepted if 1024 fit, and clamped: the answer ends with the context." in described
