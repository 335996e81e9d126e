"""A tool call. With `tool_choice` "required" the arguments follow the schema whatever the model."""

import json

from openai import OpenAI

weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"enum": [1, 3]}},
            "required": ["city", "days"],
        },
    },
}
client = OpenAI(base_url="http://localhost:3000/v1", api_key="-")
answer = client.chat.completions.create(
    model="smollm2-135m-instruct",
    messages=[{"role": "user", "content": "How will the weather be in Paris tomorrow?"}],
    tools=[weather],
    tool_choice="required",
    temperature=0,
)
call = answer.choices[0].message.tool_calls[0]
print(answer.choices[0].finish_reason, call.function.name, sorted(json.loads(call.function.arguments)))

# prints:
# tool_calls get_weather ['city', 'days']
