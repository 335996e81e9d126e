// The models of this server: their states, launching one with what fits, replicas, events, and their end.
import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { call, path } from "./api.js";
import { Dialog, Problem, bytes, seconds, usePolled } from "./widgets.js";

const BUSY = ["queued", "downloading", "converting", "loading", "warming_up"];
const EMPTY = { model: "", name: "", replicas: "1", num_shard: "1", quantize: "", ttl: "" };

const of = (model, ...rest) => `v1/models/${path(model.id)}${rest.map((part) => `/${part}`).join("")}`;

function Bar({ label, value, most, detail }) {
  const share = most ? Math.min(1, value / most) : 0;
  return html`<div class="bar">
    <span>${label}</span>
    <meter min="0" max="1" high="0.9" value=${share} aria-label=${label}></meter>
    <span>${detail}</span>
  </div>`;
}

function Fit({ model }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  async function check() {
    setBusy(true);
    setError(null);
    try {
      const [options, workers] = await Promise.all([
        call(`v1/engines/${path(model)}`),
        call("v1/workers").catch(() => ({ workers: [] })),
      ]);
      setFound({ options, free: Math.max(0, ...workers.workers.map((each) => each.free_memory_bytes ?? each.memory_bytes ?? 0)) });
    } catch (problem) {
      setFound(null);
      setError(problem);
    } finally {
      setBusy(false);
    }
  }
  useEffect(() => setFound(null), [model]);
  return html`<div class="fit">
    <p class="actions"><button type="button" class="quiet" disabled=${!model || isBusy} onClick=${check}>${isBusy ? "Checking …" : "Check what fits"}</button></p>
    <${Problem} error=${error} />
    ${found &&
    html`<table>
      <caption>Ways to serve ${found.options.model}; ${bytes(found.free)} of memory are free</caption>
      <thead><tr><th scope="col">Engine</th><th scope="col">Format</th><th scope="col">Quantisation</th><th scope="col">Memory</th><th scope="col">Reason</th></tr></thead>
      <tbody>
        ${found.options.options.map(
          (each, index) => html`<tr key=${index} class=${each.usable ? "" : "unusable"}>
            <td>${each.engine}</td><td>${each.format}</td><td>${each.quantize ?? "none"}</td>
            <td>${each.bytes ? html`<${Bar} label="Memory" value=${each.bytes} most=${found.free} detail=${bytes(each.bytes)} />` : "–"}</td>
            <td>${each.reason}</td>
          </tr>`,
        )}
      </tbody>
    </table>`}
  </div>`;
}

function Launch({ onDone }) {
  const [fields, setFields] = useState(EMPTY);
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const field = (name, label, rest = {}) => html`<label>${label}
    <input value=${fields[name]} onInput=${(e) => setFields({ ...fields, [name]: e.target.value })} ...${rest} /></label>`;
  async function launch(event) {
    event.preventDefault();
    setBusy(true);
    setError(null);
    const body = { model: fields.model.trim() };
    if (fields.name.trim()) body.name = fields.name.trim();
    if (fields.quantize) body.quantize = fields.quantize;
    for (const name of ["replicas", "num_shard"]) if (fields[name] !== "1") body[name] = Number(fields[name]);
    if (fields.ttl !== "") body.ttl = Number(fields.ttl);
    try {
      await call("v1/models?wait_ready=false", { method: "POST", body });
      setFields(EMPTY);
      onDone();
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
    }
  }
  return html`<details class="launch">
    <summary>Launch a model</summary>
    <form onSubmit=${launch}>
      <div class="fields">
        ${field("model", "Model: catalogue name, hub repository, folder or GGUF", { required: true, list: "known-models", autocomplete: "off" })}
        ${field("name", "Name for clients", { placeholder: "that of the model" })}
        <label>Quantisation
          <select value=${fields.quantize} onChange=${(e) => setFields({ ...fields, quantize: e.target.value })}>
            <option value="">that of the model</option>
            ${["int8", "gguf", "fp8"].map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
          </select>
        </label>
        ${field("replicas", "Replicas", { type: "number", min: 1 })}
        ${field("num_shard", "Shards of each", { type: "number", min: 1 })}
        ${field("ttl", "Unload after seconds without a request", { type: "number", min: 0, placeholder: "never" })}
      </div>
      <${Fit} model=${fields.model.trim()} />
      <${Problem} error=${error} />
      <p class="actions"><button type="submit" disabled=${isBusy || !fields.model.trim()}>Launch</button></p>
    </form>
  </details>`;
}

function Progress({ model }) {
  const [progress] = usePolled(() => call(of(model, "progress")), 500);
  if (!progress) return null;
  const fetched = progress.total_bytes ? ` ${bytes(progress.bytes ?? 0)} of ${bytes(progress.total_bytes)}` : "";
  return html`<div class="progress">
    <progress value=${progress.progress} max="1" aria-label="Progress of the launch"></progress>
    <span role="status">${progress.stage.replaceAll("_", " ")}${fetched}</span>
  </div>`;
}

function Events({ model, onClose }) {
  const [found, error] = usePolled(() => call(of(model, "events")), 2000);
  return html`<${Dialog} title="Events of ${model.id}" onClose=${onClose}>
    <${Problem} error=${error} />
    <ol class="events" tabindex="0" aria-label="Events">
      ${(found?.events ?? []).map(
        (each, index) => html`<li key=${index}><time>${new Date(each.at * 1000).toLocaleTimeString()}</time> <b>${each.stage}</b> ${each.message}</li>`,
      )}
    </ol>
  <//>`;
}

function Card({ model, again }) {
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const [shows, setShows] = useState(false);
  const [confirms, setConfirms] = useState(false);
  const state = model.state ?? "ready";
  async function act(...given) {
    setBusy(true);
    setError(null);
    try {
      await call(...given);
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
      again();
    }
  }
  const post = (what) => () => act(of(model, what), { method: "POST" });
  const button = (label, onClick) => html`<button type="button" class="quiet" disabled=${isBusy} onClick=${onClick}>${label}</button>`;
  const isManaged = model.state !== undefined;
  return html`<li class="card">
    <h2>${model.id} ${model.is_default && html`<small>default</small>`}</h2>
    <p><span class="state ${state}">${state.replaceAll("_", " ")}</span> ${model.parent ? `adapter of ${model.parent}` : model.task ?? ""}</p>
    ${BUSY.includes(state) && html`<${Progress} model=${model} />`}
    ${model.error && html`<p class="problem">${model.error}</p>`}
    <dl>
      ${model.model_id && html`<div><dt>Model</dt><dd>${model.model_id}</dd></div>`}
      ${model.bytes && html`<div><dt>Memory</dt><dd>${bytes(model.bytes)}</dd></div>`}
      ${model.load_seconds && html`<div><dt>Loaded in</dt><dd>${seconds(model.load_seconds)}</dd></div>`}
    </dl>
    ${model.replicas?.length > 0 &&
    html`<table>
      <caption class="hidden">Replicas of ${model.id}</caption>
      <thead><tr><th scope="col">Replica</th><th scope="col">State</th><th scope="col">Machine</th><th scope="col">Weight</th><th scope="col"><span class="hidden">Drain</span></th></tr></thead>
      <tbody>
        ${model.replicas.map(
          (each) => html`<tr key=${each.id}><td>${each.id}</td><td>${each.state}</td><td>${each.worker}</td><td>${each.weight}</td>
            <td>${model.replicas.length > 1 && button("Drain", () => act(of(model, "replicas", each.id), { method: "DELETE" }))}</td></tr>`,
        )}
      </tbody>
    </table>`}
    <${Problem} error=${error} />
    ${isManaged &&
    html`<p class="actions">
      ${BUSY.includes(state) && button("Cancel", post("cancel"))}
      ${["registered", "failed", "cancelled"].includes(state) && !model.is_static && button("Load", post("load?wait_ready=false"))}
      ${state === "ready" && button("Sleep", post("sleep"))}
      ${state === "sleeping" && button("Wake", post("wake?wait_ready=false"))}
      ${state === "ready" && !model.is_static && button("Unload", post("unload"))}
      ${state === "ready" && !model.is_static && button("Add a replica", () => act(of(model, "replicas"), { method: "POST", body: { count: 1 } }))}
      ${button("Events", () => setShows(true))}
      ${!model.is_static && button("Terminate", () => setConfirms(true))}
    </p>`}
    ${shows && html`<${Events} model=${model} onClose=${() => setShows(false)} />`}
    ${confirms &&
    html`<${Dialog} title="Terminate ${model.id}?" onClose=${() => setConfirms(false)}>
      <p>Its running requests are answered first; then it is stopped and forgotten. Files on the disk stay.</p>
      <p class="actions">${button("Terminate", () => (setConfirms(false), act(of(model), { method: "DELETE" })))}</p>
    <//>`}
  </li>`;
}

export function Models() {
  const [listed, error, again] = usePolled(() => call("v1/models"), 1500);
  const [cached] = usePolled(() => call("v1/cache/models"), 60000);
  const [instances, unmanaged] = usePolled(() => call("v1/models/instances"), 15000);
  const models = listed?.data ?? [];
  return html`<div class="models">
    <h1>Models</h1>
    <${Problem} error=${error} />
    ${instances && html`<${Launch} onDone=${again} />`}
    ${!instances && unmanaged && html`<p class="hint">Models cannot be launched from here: ${unmanaged.message}</p>`}
    <datalist id="known-models">${(cached?.list ?? []).map((each) => html`<option key=${each.path} value=${each.path}>${each.model_name}</option>`)}</datalist>
    <ul class="cards">${models.map((model) => html`<${Card} key=${model.id} model=${model} again=${again} />`)}</ul>
    ${cached?.list.length > 0 &&
    html`<section>
      <h2>On the disk</h2>
      <table>
        <caption class="hidden">Models on the disk</caption>
        <thead><tr><th scope="col">Model</th><th scope="col">Size</th><th scope="col">In use</th></tr></thead>
        <tbody>${cached.list.map((each) => html`<tr key=${each.path}><td title=${each.path}>${each.model_name}</td><td>${bytes(each.bytes)}</td><td>${each.in_use ? "yes" : "no"}</td></tr>`)}</tbody>
      </table>
    </section>`}
  </div>`;
}
