"""TGI's own client, text-generation 0.7, which is no longer developed."""

from text_generation import Client

client = Client("http://localhost:3000", timeout=60)
answer = client.generate("The capital of France is", max_new_tokens=2)
print(repr(answer.generated_text), answer.details.finish_reason.value)
sampled = client.generate("The sea is", do_sample=True, seed=7, max_new_tokens=2)
print(sampled.details.seed, sampled.details.generated_tokens)

# prints:
# ' Paris.' length
# 7 2
