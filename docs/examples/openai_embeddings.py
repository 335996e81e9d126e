"""Embeddings by OpenAI's client, from `funitel --model-id all-minilm-l6-v2 --port 3001`."""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:3001/v1", api_key="-")
texts = ["The cat sleeps.", "A kitten takes a nap.", "Stocks fell sharply today."]
answer = client.embeddings.create(model="all-minilm-l6-v2", input=texts)
cat, kitten, stocks = (item.embedding for item in answer.data)
print(len(cat), "numbers each")
print("cat and kitten:", round(sum(a * b for a, b in zip(cat, kitten, strict=True)), 1))
print("cat and stocks:", round(sum(a * b for a, b in zip(cat, stocks, strict=True)), 1))

# prints:
# 384 numbers each
# cat and kitten: 0.7
# cat and stocks: 0.0
