// The npm packages `ai` with `@ai-sdk/openai`, and `openai`, as they are, with a sound. Prints what it got as one line of JSON.
//   node sound.mjs URL SOUND, where SOUND is a file
import { createReadStream, readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import * as ai from "ai";
import OpenAI from "openai";

const [url, file] = process.argv.slice(2);
const transcribe = ai.transcribe ?? ai.experimental_transcribe;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const sound = () => ({ file: createReadStream(file), model: "whisper-1" });
const got = {};

const model = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).transcription("whisper-1");
const heard = await transcribe({ model, audio: readFileSync(file), maxRetries: 0 });
got.ai = { text: heard.text, language: heard.language ?? null, segments: heard.segments, seconds: heard.durationInSeconds };
got.openai = (await client.audio.transcriptions.create(sound())).text;
got.verbose = (await client.audio.transcriptions.create({ ...sound(), response_format: "verbose_json" })).text;
got.translated = (await client.audio.translations.create(sound())).text;
got.streamed = "";
for await (const event of await client.audio.transcriptions.create({ ...sound(), stream: true })) {
  if (event.type === "transcript.text.delta") got.streamed += event.delta;
}
console.log(JSON.stringify(got));
process.exit(0);
