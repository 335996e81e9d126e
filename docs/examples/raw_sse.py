"""TGI's stream without a client library: server-sent events, one token each."""

import json

import httpx

body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 2, "details": True}}
with httpx.stream("POST", "http://localhost:3000/generate_stream", json=body, timeout=60) as answer:
    answer.raise_for_status()
    for line in answer.iter_lines():
        if line.startswith("data:"):
            event = json.loads(line.removeprefix("data:"))
            print(event["index"], repr(event["token"]["text"]))
print(repr(event["generated_text"]), event["details"]["finish_reason"])

# prints:
# 1 ' Paris'
# 2 '.'
# ' Paris.' length
