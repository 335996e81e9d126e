"""What schemathesis must know of our streams: each event's data is JSON, and OpenAI's end with a word that is none.

Loaded by schemathesis itself, through SCHEMATHESIS_HOOKS.
"""

import json
from typing import Any

import schemathesis

DONE = "[DONE]"


@schemathesis.deserializer("text/event-stream")
def read_events(context: Any, response: Any) -> list[Any]:
    """The records a stream carries."""
    frames = response.content.decode().split("\n\n")
    lines = [line for frame in frames for line in frame.split("\n") if line.startswith("data: ")]
    texts = [line.removeprefix("data: ") for line in lines]
    return [json.loads(text) for text in texts if text != DONE]
