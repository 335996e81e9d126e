"""Documents by relevance to a query, from `funitel --model-id all-minilm-l6-v2 --port 3001`."""

import httpx

body = {"query": "How do cats rest?", "documents": ["Stocks fell sharply today.", "A kitten takes a nap."]}
answer = httpx.post("http://localhost:3001/v1/rerank", json=body).raise_for_status().json()
for result in answer["results"]:
    print(result["index"], body["documents"][result["index"]])

# prints:
# 1 A kitten takes a nap.
# 0 Stocks fell sharply today.
