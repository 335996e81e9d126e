// The npm package `@anthropic-ai/sdk`, as it is. Prints what it got as one line of JSON.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ask = { model: "any", max_tokens: 30, messages, temperature: 0 };
const got = {};

const message = await client.messages.create(ask);
got.text = message.content[0].text;
got.usage = message.usage;
const stream = client.messages.stream(ask);
got.streamed = "";
stream.on("text", (text) => (got.streamed += text));
got.final = await stream.finalMessage();
const stopped = await client.messages.create({ ...ask, stop_sequences: ["Paris"] });
got.stop = [stopped.stop_reason, stopped.stop_sequence];
got.count = (await client.messages.countTokens({ model: "any", messages })).input_tokens;
got.error = await client.messages.create({ ...ask, max_tokens: 0 }).catch((error) => [error.status, error.type]);
console.log(JSON.stringify(got));
