// The npm package `@anthropic-ai/sdk`, as it is, where a tool must be called. Prints what it got as one line of JSON.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const input_schema = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const tools = [{ name: "get_weather", input_schema }];
const tool_choice = { type: "tool", name: "get_weather" };
const ask = { model: "any", max_tokens: 100, messages, temperature: 0, tools, tool_choice };

const call = (await client.messages.create(ask)).content[0];
const callStreamed = (await client.messages.stream(ask).finalMessage()).content[0];
console.log(JSON.stringify({ call, callStreamed }));
