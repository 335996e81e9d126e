"""Anthropic's Messages API, whole and streamed."""

from anthropic import Anthropic

client = Anthropic(base_url="http://localhost:3000", api_key="-")
request = {
    "model": "smollm2-135m-instruct",
    "max_tokens": 32,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "extra_body": {"temperature": 0},
}
message = client.messages.create(**request)
print(message.content[0].text, message.stop_reason, message.usage.output_tokens)
with client.messages.stream(**request) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()

# prints:
# The capital of France is Paris. end_turn 8
# The capital of France is Paris.
