"""A streamed chat: text as it is computed, and the usage in the last event."""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:3000/v1", api_key="-")
stream = client.chat.completions.create(
    model="smollm2-135m-instruct",
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=32,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    else:
        print(f"\n{chunk.usage.completion_tokens} tokens")

# prints:
# The capital of France is Paris.
# 8 tokens
