"""Two prompts in one request for completions, with log-probabilities and a stop."""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:3000/v1", api_key="-")
answer = client.completions.create(
    model="smollm2-135m-instruct",
    prompt=["1, 2, 3, 4,", "The capital of France is"],
    max_tokens=8,
    temperature=0,
    stop=["7", "."],
    logprobs=1,
)
for choice in answer.choices:
    print(repr(choice.text), choice.finish_reason, round(choice.logprobs.token_logprobs[0], 1))

# prints:
# ' 5, 6, ' stop -0.1
# ' Paris' stop -0.3
