// The routes of /openapi.json, each with its fields, and a form that sends a request.
import { html, useMemo, useState } from "./vendor/preact-htm.js";
import { ApiError, call, request, root } from "./api.js";
import { Problem, usePolled } from "./widgets.js";

const DEPTH = 6; // of nested records in an example

const resolve = (document, schema) => (schema?.$ref ? document.components.schemas[schema.$ref.split("/").pop()] : schema);

// A value that a schema takes: its examples and defaults where there are some, and of optional fields none.
export function exampleOf(document, given, depth = 0) {
  const schema = resolve(document, given);
  if (!schema || depth > DEPTH) return null;
  if (schema.examples?.length) return schema.examples[0];
  if (schema.example !== undefined) return schema.example;
  if (schema.const !== undefined) return schema.const;
  if (schema.default !== undefined && schema.default !== null) return schema.default;
  if (schema.enum) return schema.enum[0];
  const choice = (schema.anyOf ?? schema.oneOf ?? schema.allOf)?.find((each) => each.type !== "null");
  if (choice) return exampleOf(document, choice, depth + 1);
  switch (Array.isArray(schema.type) ? schema.type[0] : schema.type) {
    case "object":
      return Object.fromEntries(
        Object.entries(schema.properties ?? {})
          .filter(([name]) => schema.required?.includes(name))
          .map(([name, value]) => [name, exampleOf(document, value, depth + 1)]),
      );
    case "array":
      return [exampleOf(document, schema.items ?? {}, depth + 1)];
    case "string":
      return "Hello";
    case "integer":
    case "number":
      return schema.minimum ?? 1;
    case "boolean":
      return false;
    default:
      return "Hello";
  }
}

function typeOf(document, schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.map((each) => typeOf(document, each)).filter((each) => each !== "null").join(" | ");
  if (schema.type === "array") return `${typeOf(document, schema.items) || "any"}[]`;
  return schema.type ?? "any";
}

function Fields({ document, schema }) {
  const resolved = resolve(document, schema);
  const properties = Object.entries(resolved?.properties ?? {});
  if (!properties.length) return null;
  return html`<div class="scrolled" tabindex="0" role="region" aria-label="Fields of the body"><table>
    <caption>Fields of the body</caption>
    <thead><tr><th scope="col">Field</th><th scope="col">Type</th><th scope="col">Description</th></tr></thead>
    <tbody>
      ${properties.map(
        ([name, each]) => html`<tr key=${name}><th scope="row"><code>${name}</code>${resolved.required?.includes(name) ? " *" : ""}</th>
          <td>${typeOf(document, each)}</td><td>${each.description ?? ""}${each.default !== undefined && each.default !== null ? ` (default ${JSON.stringify(each.default)})` : ""}</td></tr>`,
      )}
    </tbody>
  </table></div>`;
}

function Try({ document, method, path, operation }) {
  const content = operation.requestBody?.content?.["application/json"];
  const parameters = operation.parameters ?? [];
  const [body, setBody] = useState(() => (content ? JSON.stringify(exampleOf(document, content.schema), null, 2) : ""));
  const [values, setValues] = useState({});
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  const [abort, setAbort] = useState(null);
  async function send(event) {
    event.preventDefault();
    setError(null);
    setAnswer(null);
    const query = new URLSearchParams();
    let target = path;
    for (const { name, in: place } of parameters) {
      const value = values[name] ?? "";
      if (place === "path") target = target.replace(`{${name}}`, encodeURIComponent(value));
      else if (value) query.set(name, value);
    }
    const controller = new AbortController();
    setAbort(controller);
    try {
      if (content && body.trim()) JSON.parse(body);
      const url = target.slice(1) + (query.size ? `?${query}` : "");
      const response = await request(url || ".", { method: method.toUpperCase(), body: content ? body : undefined, signal: controller.signal });
      const shown = { status: response.status, type: response.headers.get("content-type") ?? "", text: "" };
      setAnswer(shown);
      const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader?.read(); part && !part.done; part = await reader.read()) {
        shown.text += part.value;
        setAnswer({ ...shown });
      }
      if (shown.type.startsWith("application/json")) setAnswer({ ...shown, text: JSON.stringify(JSON.parse(shown.text), null, 2) });
    } catch (problem) {
      if (problem.name !== "AbortError") setError(problem instanceof SyntaxError ? new ApiError(0, `The body is not JSON: ${problem.message}`) : problem);
    } finally {
      setAbort(null);
    }
  }
  return html`<form onSubmit=${send}>
    ${parameters.map(
      (each) => html`<label key=${each.name}>${each.name} (${each.in})
        <input value=${values[each.name] ?? ""} required=${each.required} placeholder=${each.schema?.default ?? ""}
          onInput=${(e) => setValues({ ...values, [each.name]: e.target.value })} /></label>`,
    )}
    ${content && html`<label>Body <textarea rows=${Math.min(14, body.split("\n").length + 1)} spellcheck=${false} value=${body} onInput=${(e) => setBody(e.target.value)}></textarea></label>`}
    <p class="actions">
      ${abort ? html`<button type="button" class="stop" onClick=${() => abort.abort()}>Stop</button>` : html`<button type="submit">Send</button>`}
    </p>
    <${Problem} error=${error} />
    ${answer &&
    html`<p role="status">Status ${answer.status}</p>
    <pre tabindex="0" aria-label="Answer"><code>${answer.text}</code></pre>`}
  </form>`;
}

function Route({ document, method, path, operation }) {
  const [isOpen, setOpen] = useState(false);
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  return html`<details class="route" onToggle=${(e) => setOpen(e.target.open)}>
    <summary><code class="method ${method}">${method.toUpperCase()}</code> <code>${path}</code> <span>${operation.summary}</span></summary>
    ${isOpen &&
    html`<div>
      <${Try} document=${document} method=${method} path=${path} operation=${operation} />
      ${body && html`<${Fields} document=${document} schema=${body} />`}
    </div>`}
  </details>`;
}

export function Explorer() {
  const [document, error] = usePolled(() => call("openapi.json"), 3600000);
  const [filter, setFilter] = useState("");
  const routes = useMemo(
    () => Object.entries(document?.paths ?? {}).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => ({ path, method, operation }))),
    [document],
  );
  const wanted = filter.toLowerCase();
  const shown = routes.filter(({ path, operation }) => `${path} ${operation.summary}`.toLowerCase().includes(wanted));
  return html`<div class="explorer">
    <h1>Docs</h1>
    <p>The routes of this server. The document is <a href=${new URL("openapi.json", root)}>/openapi.json</a>.</p>
    <${Problem} error=${error} />
    <label>Filter <input type="search" value=${filter} placeholder="path or summary" onInput=${(e) => setFilter(e.target.value)} /></label>
    ${shown.map((each) => html`<${Route} key=${`${each.method} ${each.path}`} document=${document} ...${each} />`)}
  </div>`;
}
