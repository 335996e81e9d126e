// The npm package `ai`, as it is, over a provider. Prints what it got as one line of JSON.
//   node ai_sdk.mjs CASE PROVIDER URL
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embed, embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [name, kind, url] = process.argv.slice(2);
const compatible = (extra = {}) => createOpenAICompatible({ name: "funitel", baseURL: `${url}/v1`, apiKey: "none", ...extra });
const openai = () => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const providers = {
  compatible: () => compatible({ includeUsage: true, supportsStructuredOutputs: true }).chatModel("any"),
  completion: () => compatible().completionModel("any"),
  chat: () => openai().chat("any"),
  responses: () => openai().responses("any"),
  anthropic: () => createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("any"),
};
const prompt = "What is the capital of France?";
const limits = { maxOutputTokens: 100, temperature: 0, maxRetries: 0 };
const call = () => ({ model: providers[kind](), prompt, ...limits });
const city = z.object({ city: z.enum(["Paris", "Rome"]), isCapital: z.boolean() });
const asked = [];
const tools = {
  getWeather: tool({
    description: "Tell the weather in a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => (asked.push(city), `It is sunny in ${city}.`),
  }),
};
// The first step calls a tool, the others answer.
const steps = { tools, stopWhen: stepCountIs(2), prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : { toolChoice: "required" }) };
const all = async (parts) => {
  const found = [];
  for await (const part of parts) found.push(part);
  return found;
};
const errors = [];
const onError = ({ error }) => errors.push(String(error?.responseBody ?? error));

const cases = {
  async text() {
    const { text, usage, finishReason } = await generateText(call());
    return { text, usage, finishReason };
  },
  async streamed() {
    const result = streamText({ ...call(), onError });
    const pieces = await all(result.textStream);
    return { pieces, usage: await result.usage, finishReason: await result.finishReason };
  },
  async tools() {
    const { text, steps: done } = await generateText({ ...call(), ...steps });
    return { text, asked, count: done.length };
  },
  async streamedTools() {
    const result = streamText({ ...call(), ...steps, onError });
    const types = (await all(result.fullStream)).map((part) => part.type);
    return { types, asked, text: await result.text };
  },
  async free() {
    const { text, steps: done } = await generateText({ ...call(), tools, stopWhen: stepCountIs(2) });
    return { text, asked, count: done.length };
  },
  async object() {
    return { object: (await generateObject({ ...call(), schema: city })).object };
  },
  async streamedObject() {
    const result = streamObject({ ...call(), schema: city, onError });
    const parts = await all(result.partialObjectStream);
    return { count: parts.length, object: await result.object };
  },
  async array() {
    const { object } = await generateObject({ ...call(), output: "enum", enum: ["Paris", "Rome"] });
    return { object };
  },
  async output() {
    const { output } = await generateText({ ...call(), output: Output.object({ schema: city }) });
    return { object: output };
  },
  async outputAndTools() {
    const { output } = await generateText({ ...call(), ...steps, output: Output.object({ schema: city }) });
    return { object: output, asked };
  },
  async embeddings() {
    const model = compatible().embeddingModel("any");
    const one = await embed({ model, value: "The sea is deep.", maxRetries: 0 });
    const many = await embedMany({ model, values: ["The sea is deep.", "Birds fly."], maxRetries: 0 });
    return { width: one.embedding.length, count: many.embeddings.length, usage: many.usage };
  },
};

let got;
try {
  got = await cases[name]();
} catch (error) {
  got = { error: `${error.name}: ${error.message}`, of: error.responseBody ?? error.text ?? null };
}
console.log(JSON.stringify({ ...got, errors }));
process.exit(0);
