// The npm package `openai`, as it is. Prints what it got as one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const chat = { model: "any", messages, temperature: 0, max_tokens: 30 };
const got = {};

got.models = (await client.models.list()).data.map((model) => model.id);
got.chat = (await client.chat.completions.create(chat)).choices[0].message.content;
got.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
  got.streamed += chunk.choices[0].delta.content ?? "";
}
const choices = await client.chat.completions.create({ ...chat, temperature: 1, seed: 1, n: 2, logprobs: true });
got.choices = choices.choices.map((choice) => choice.message.content);
got.logprobs = choices.choices[0].logprobs.content.map((entry) => entry.token).join("");

const response = { model: "any", input: messages[0].content, temperature: 0, max_output_tokens: 30 };
const answered = await client.responses.create(response);
got.response = answered.output_text;
got.retrieved = (await client.responses.retrieve(answered.id)).id === answered.id;
got.events = [];
got.responseStreamed = "";
for await (const event of await client.responses.create({ ...response, stream: true })) {
  got.events.push(event.sequence_number);
  if (event.type === "response.output_text.delta") got.responseStreamed += event.delta;
}
const following = { ...response, input: "And of Italy?", previous_response_id: answered.id };
got.following = (await client.responses.create(following)).previous_response_id === answered.id;
await client.responses.delete(answered.id);
got.error = await client.responses.retrieve(answered.id).catch((error) => error.status);
console.log(JSON.stringify(got));
