"""`funitel generate`: complete one prompt, as streamed text or as one JSON object."""

import json
import os
import sys
from contextlib import closing
from typing import Any

from funitel.launcher.cli.server import connected, model_of
from funitel.launcher.cli.settings import GenerateSettings
from funitel.launcher.terminal_ui.http_client import Api
from funitel.launcher.terminal_ui.terminal import without_controls
from funitel.proto.errors import Incomplete, InvalidRequest


def generate(settings: GenerateSettings) -> None:
    """Write the completion to stdout.

    Raises:
        FunitelError: the prompt is invalid, no server answers, or it failed.
    """
    prompt = _prompt(settings.prompt)
    with connected(settings) as api:
        last = _write(api, {"inputs": prompt, "parameters": _parameters(settings)}, is_text=not settings.json)
        if settings.json:
            print(json.dumps(_summary(api, prompt, last), ensure_ascii=False))


def _prompt(given: str) -> str:
    """The prompt as given, or all of stdin for `-`."""
    content = sys.stdin.buffer.read() if given == "-" else os.fsencode(given)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the prompt must be UTF-8: byte {error.start} is not") from error
    if not text:
        raise InvalidRequest("the prompt must not be empty")
    return text


def _parameters(settings: GenerateSettings) -> dict[str, Any]:
    """Native parameters; any sampling flag turns sampling on, else decoding is greedy."""
    flags = {
        "temperature": settings.temperature,
        "top_p": None if settings.top_p == 1.0 else settings.top_p,
        "top_k": settings.top_k,
        "seed": settings.seed,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    sampling = {} if settings.temperature == 0 else given | {"do_sample": bool(given) or settings.top_p is not None}
    return {"max_new_tokens": settings.max_tokens, "details": True, "stop": list(settings.stop), **sampling}


def _write(api: Api, body: dict[str, Any], *, is_text: bool) -> dict[str, Any]:
    """Print tokens as they arrive, if `is_text`; return the last event, which has the whole text."""
    shown = without_controls if sys.stdout.isatty() else str
    with closing(api.stream("/generate_stream", body)) as events:
        for event in events:
            if is_text and not event["token"]["special"]:
                print(shown(event["token"]["text"]), end="", flush=True)
            if event.get("generated_text") is not None:
                if is_text:
                    print(flush=True)
                whole: dict[str, Any] = event
                return whole
    raise Incomplete("the server ended the completion without a finish reason")


def _summary(api: Api, prompt: str, last: dict[str, Any]) -> dict[str, Any]:
    details = last["details"]
    return {
        "model": model_of(api),
        "prompt": prompt,
        "text": last["generated_text"],
        "finish_reason": details["finish_reason"],
        "num_tokens": details["generated_tokens"],
        "num_prompt_tokens": details["input_length"],
        "seed": details["seed"],
    }
