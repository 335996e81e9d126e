// One conversation with one model: what is sent, what comes back, and how it is exported.
import { events, root } from "./api.js";

export const DEFAULTS = {
  system: "",
  temperature: "",
  top_p: "",
  max_tokens: "512",
  seed: "",
  stop: "",
  schema: "",
  tools: "",
  logprobs: false,
};

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: ${error.message}`);
  }
}

// The body of a request; throws an Error that names the field which is not valid.
export function bodyOf(model, messages, settings) {
  const sent = messages.map(({ role, content, tool_calls }) => ({ role, content, ...(tool_calls?.length ? { tool_calls } : {}) }));
  if (settings.system.trim()) sent.unshift({ role: "system", content: settings.system });
  const body = { model, messages: sent };
  for (const name of NUMBERS) {
    if (settings[name] === "") continue;
    const number = Number(settings[name]);
    if (Number.isNaN(number)) throw new Error(`${name}: ${settings[name]} is not a number`);
    body[name] = number;
  }
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.schema.trim()) {
    const schema = parsed(settings.schema, "JSON schema");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.tools.trim()) body.tools = parsed(settings.tools, "Tools");
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

function addCalls(calls, deltas) {
  for (const delta of deltas) {
    const call = (calls[delta.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (delta.id) call.id = delta.id;
    if (delta.function?.name) call.function.name = delta.function.name;
    call.function.arguments += delta.function?.arguments ?? "";
  }
}

const LEAST_MS = 40; // between two looks at an answer that grows

// Calls `show` with the newest value, no more often than the page can draw it: a long answer takes longer.
function paced(show) {
  let newest = null;
  let timer = null;
  let cost = 0;
  function draw() {
    timer = null;
    const began = performance.now();
    show(newest);
    requestAnimationFrame(() => setTimeout(() => (cost = performance.now() - began), 0));
  }
  return {
    push(value) {
      newest = value;
      timer ??= setTimeout(draw, Math.max(LEAST_MS, 3 * cost));
    },
    end(value) {
      clearTimeout(timer);
      show(value);
    },
  };
}

// Send a body and call `onChange(answer)` as the answer grows. An abort leaves what has come.
export async function ask(body, signal, onChange) {
  const began = performance.now();
  let first = null;
  const answer = { role: "assistant", content: "", reasoning: "", tool_calls: [], tokens: [], facts: {}, body };
  const shown = paced(onChange);
  const stream = { ...body, stream: true, stream_options: { include_usage: true } };
  try {
    for await (const event of events("v1/chat/completions", stream, signal)) {
      const choice = event.choices?.[0];
      if (choice) {
        const delta = choice.delta ?? {};
        if (first === null && (delta.content || delta.tool_calls || delta.reasoning_content)) first = performance.now();
        answer.content += delta.content ?? "";
        answer.reasoning += delta.reasoning_content ?? "";
        if (delta.tool_calls) addCalls(answer.tool_calls, delta.tool_calls);
        if (choice.logprobs?.content) answer.tokens.push(...choice.logprobs.content);
        if (choice.finish_reason) answer.facts.finish = choice.finish_reason;
      }
      if (event.usage) answer.facts.usage = event.usage;
      const now = performance.now();
      if (first !== null) {
        answer.facts.first = (first - began) / 1000;
        answer.facts.total = (now - began) / 1000;
        const tokens = answer.facts.usage?.completion_tokens;
        if (tokens > 1 && now > first) answer.facts.rate = (tokens - 1) / ((now - first) / 1000);
      }
      shown.push({ ...answer });
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    answer.facts.finish = "stopped";
  } finally {
    shown.end({ ...answer });
  }
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
// JSON as Python: only the three words differ.
function python(value, indent = "    ") {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) {
    return `[\n${value.map((each) => `${indent}    ${python(each, `${indent}    `)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([k, v]) => `${indent}    ${JSON.stringify(k)}: ${python(v, `${indent}    `)},\n`);
    return `{\n${entries.join("")}${indent}}`;
  }
  return JSON.stringify(value);
}

export function asCurl(body) {
  return [
    `curl ${new URL("v1/chat/completions", root)}`,
    `  -H 'Content-Type: application/json'`,
    `  -H "Authorization: Bearer $FUNITEL_API_KEY"`,
    `  -d ${quoted(JSON.stringify(body))}`,
  ].join(" \\\n");
}

export function asPython(body) {
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},\n`);
  return `import os

from openai import OpenAI

client = OpenAI(base_url="${new URL("v1", root)}", api_key=os.environ.get("FUNITEL_API_KEY", "-"))
answer = client.chat.completions.create(
${fields.join("")})
print(answer.choices[0].message.content)
`;
}
