"""A tool call by Anthropic's client, and the answer to its result."""

from anthropic import Anthropic

client = Anthropic(base_url="http://localhost:3000", api_key="-")
tool = {
    "name": "get_time",
    "description": "The time in a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}
messages = [{"role": "user", "content": "What time is it in Paris?"}]
request = {"model": "smollm2-135m-instruct", "max_tokens": 40, "tools": [tool], "extra_body": {"temperature": 0}}
asked = client.messages.create(messages=messages, tool_choice={"type": "tool", "name": "get_time"}, **request)
call = asked.content[0]
print(asked.stop_reason, call.name, call.input)
result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is 12:30 in Paris."}
messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
told = client.messages.create(messages=messages, tool_choice={"type": "none"}, **request)
print(told.content[0].type)

# prints:
# tool_use get_time {'city': 'Paris'}
# text
