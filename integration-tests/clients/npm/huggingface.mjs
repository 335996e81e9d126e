// The npm package `@huggingface/inference`, as it is: it asks /v1/completions for text. Prints what it got as one line of JSON.
import { InferenceClient } from "@huggingface/inference";

const client = new InferenceClient(undefined, { endpointUrl: process.argv[2] });
const question = "What is the capital of France?";
const inputs = `<|im_start|>user\n${question}<|im_end|>\n<|im_start|>assistant\n`;
const generate = { inputs, parameters: { max_new_tokens: 20, temperature: 0 } };
const got = {};

got.generated = (await client.textGeneration(generate)).generated_text;
got.pieces = [];
for await (const chunk of client.textGenerationStream(generate)) got.pieces.push(chunk.choices[0].text);
const chat = { messages: [{ role: "user", content: question }], temperature: 0, max_tokens: 30 };
got.chat = (await client.chatCompletion(chat)).choices[0].message.content;
got.chatStreamed = "";
for await (const chunk of client.chatCompletionStream(chat)) got.chatStreamed += chunk.choices[0].delta.content ?? "";
console.log(JSON.stringify(got));
