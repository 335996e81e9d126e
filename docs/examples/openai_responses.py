"""The Responses API: the second request continues the answer that the server has stored."""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:3000/v1", api_key="-")
first = client.responses.create(
    model="smollm2-135m-instruct",
    input="What is the capital of France?",
    max_output_tokens=32,
    temperature=0,
)
print(first.output_text)
second = client.responses.create(
    model="smollm2-135m-instruct",
    previous_response_id=first.id,
    input="And what is the capital of Italy?",
    max_output_tokens=32,
    temperature=0,
)
print(second.output_text)

# prints:
# The capital of France is Paris.
# The capital of Italy is Rome.
