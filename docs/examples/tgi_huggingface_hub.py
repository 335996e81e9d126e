"""TGI's API by huggingface_hub: one answer with details, a stream, and a grammar."""

from huggingface_hub import InferenceClient

client = InferenceClient("http://localhost:3000")
answer = client.text_generation("The capital of France is", max_new_tokens=2, details=True, return_full_text=False)
print(repr(answer.generated_text), [token.id for token in answer.details.tokens])
for text in client.text_generation("1, 2, 3,", max_new_tokens=8, stream=True):
    print(text, end="", flush=True)
print()
date = {"type": "regex", "value": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"}
print(client.text_generation("Born on ", max_new_tokens=20, grammar=date, return_full_text=False))

# prints:
# ' Paris.' [7042, 30]
#  4, 5, 6
# 2022-01-01
