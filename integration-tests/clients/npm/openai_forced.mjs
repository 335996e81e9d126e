// The npm package `openai`, as it is, where the answer must have a form. Prints what it got as one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const chat = { model: "any", messages, temperature: 0, max_tokens: 100 };
const properties = { city: { enum: ["Paris", "Rome"] } };
const parameters = { type: "object", properties, required: ["city"], additionalProperties: false };
const got = {};

const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const called = await client.chat.completions.create({ ...chat, tools, tool_choice: "required" });
got.call = called.choices[0].message.tool_calls[0].function;
const runner = client.chat.completions.stream({ ...chat, tools, tool_choice: "required" });
got.callStreamed = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;
const format = { type: "json_schema", json_schema: { name: "weather", schema: parameters, strict: true } };
const shaped = await client.chat.completions.create({ ...chat, response_format: format });
got.shaped = shaped.choices[0].message.content;
console.log(JSON.stringify(got));
