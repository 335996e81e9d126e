"""A batch by OpenAI's client, from a server that was started with `--batch-dir`."""

import json
import time

from openai import OpenAI

client = OpenAI(base_url="http://localhost:3000/v1", api_key="-")
questions = {"sum": "What is 2 + 2?", "city": "What is the capital of France?"}
lines = []
for name, question in questions.items():
    body = {"model": "tgi", "messages": [{"role": "user", "content": question}], "max_tokens": 12, "temperature": 0}
    lines.append(json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}))
file = client.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts.completed, "of", batch.request_counts.total)
for line in client.files.content(batch.output_file_id).text.splitlines():
    result = json.loads(line)
    print(result["custom_id"], result["response"]["status_code"])

# prints:
# completed 2 of 2
# sum 200
# city 200
