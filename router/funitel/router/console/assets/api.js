// Requests to the server that this page came from. The API key stays in the session storage of this tab.

const KEY = "funitel-key";

export const root = new URL("../", import.meta.url);

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  dispatchEvent(new Event("funitel-key"));
}

// Of the session of this browser, if it has one: a page of another site cannot read it.
let csrfToken = null;

export function setCsrfToken(token) {
  csrfToken = token ?? null;
  dispatchEvent(new Event("funitel-key"));
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Every protocol has its own error record; this finds the message in each.
function messageOf(status, text) {
  try {
    const body = JSON.parse(text);
    const found = body.error?.message ?? body.error ?? body.message ?? body.detail;
    if (typeof found === "string" && found) return found;
  } catch {
    // not JSON
  }
  if (status === 401) return "Log in, or give an API key.";
  return text.slice(0, 500) || `The server answered with status ${status}.`;
}

export async function request(path, { method = "GET", body, signal, headers = {} } = {}) {
  const all = { ...headers };
  if (apiKey()) all.authorization = `Bearer ${apiKey()}`;
  else if (csrfToken) all["x-funitel-csrf"] = csrfToken;
  if (body !== undefined) all["content-type"] = "application/json";
  const content = body === undefined || typeof body === "string" ? body : JSON.stringify(body);
  let response;
  try {
    response = await fetch(new URL(path, root), { method, body: content, signal, headers: all });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  return response;
}

export async function call(path, options) {
  const response = await request(path, options);
  const text = await response.text();
  if (!response.ok) throw new ApiError(response.status, messageOf(response.status, text));
  return text ? JSON.parse(text) : null;
}

// The JSON of each Server-Sent Event, until the stream ends or says [DONE].
export async function* events(path, body, signal) {
  const response = await request(path, { method: "POST", body, signal });
  if (!response.ok) throw new ApiError(response.status, messageOf(response.status, await response.text()));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart())
        .join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(response.status, messageOf(response.status, data));
      yield event;
    }
  }
}

export const path = (...parts) => parts.map((part) => encodeURIComponent(part)).join("/");
