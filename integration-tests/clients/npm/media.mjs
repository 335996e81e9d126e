// The npm package `ai` with `@ai-sdk/openai-compatible`, as they are, with a picture. Prints what it got as one line of JSON.
//   node media.mjs URL PICTURE, where PICTURE is a file
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, file] = process.argv.slice(2);
const picture = readFileSync(file);
const model = createOpenAICompatible({ name: "funitel", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true }).chatModel("any");
const text = { type: "text", text: "What is this? " };
const ask = (...parts) => ({ model, messages: [{ role: "user", content: [text, ...parts] }], temperature: 0, maxOutputTokens: 8, maxRetries: 0 });
const bytes = { type: "image", image: picture };
const got = {};

const answered = await generateText(ask(bytes));
got.text = answered.text;
got.inputTokens = answered.usage.inputTokens;
const address = { type: "file", data: `data:image/png;base64,${picture.toString("base64")}`, mediaType: "image/png" };
got.address = (await generateText(ask(address))).text;
const result = streamText({ ...ask(bytes), onError: () => {} });
got.streamed = "";
for await (const piece of result.textStream) got.streamed += piece;
got.two = (await generateText(ask(bytes, bytes))).usage.inputTokens;
got.broken = await generateText(ask({ type: "image", image: new Uint8Array([1, 2, 3]), mediaType: "image/png" })).catch((error) => [error.statusCode, error.message]);
console.log(JSON.stringify(got));
