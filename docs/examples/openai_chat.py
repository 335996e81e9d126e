"""A chat by OpenAI's client, with a system prompt and the tokens it took."""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:3000/v1", api_key="-")
answer = client.chat.completions.create(
    model="smollm2-135m-instruct",
    messages=[
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    max_tokens=32,
    temperature=0,
)
print(answer.choices[0].message.content)
print(answer.choices[0].finish_reason, answer.usage.prompt_tokens, answer.usage.completion_tokens)

# prints:
# The capital of France is Paris.
# stop 27 8
