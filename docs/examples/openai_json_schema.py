"""An answer that follows a JSON schema, by `response_format`."""

import json

from openai import OpenAI

schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}
client = OpenAI(base_url="http://localhost:3000/v1", api_key="-")
answer = client.chat.completions.create(
    model="smollm2-135m-instruct",
    messages=[{"role": "user", "content": "Describe Paris as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    temperature=0,
)
print(json.loads(answer.choices[0].message.content))

# prints:
# {'city': 'Paris', 'is_capital': False}
