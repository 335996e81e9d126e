"""Tokens of a text and of a chat, as the model will read them."""

import httpx

tokens = httpx.post("http://localhost:3000/tokenize", json={"inputs": "The sea is blue"}).json()
print([(token["id"], token["text"]) for token in tokens])
chat = {"messages": [{"role": "user", "content": "Hello"}]}
answer = httpx.post("http://localhost:3000/chat_tokenize", json=chat).json()
print(repr(answer["templated_text"][-55:]))

# prints:
# [(504, 'The'), (3426, ' sea'), (314, ' is'), (4461, ' blue')]
# '<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n'
