// Chat with one model, or with several side by side.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { call } from "./api.js";
import { DEFAULTS, asCurl, asPython, ask, bodyOf } from "./conversation.js";
import { Markdown } from "./markdown.js";
import { Heatmap } from "./heatmap.js";
import { Copy, Dialog, Problem, count, seconds, usePolled } from "./widgets.js";

const SETTINGS = "funitel-chat";
const MOST_PANES = 4;
let nextId = 0;
const emptyPane = (model) => ({ id: nextId++, model, messages: [], error: null, isBusy: false });

function Facts({ answer }) {
  const { first, rate, usage, finish, total } = answer.facts;
  const parts = [];
  if (first !== undefined) parts.push(`first token ${seconds(first)}`);
  if (rate !== undefined) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (usage) parts.push(`${count(usage.prompt_tokens)} + ${count(usage.completion_tokens)} tokens`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${count(cached)} cached`);
  if (total !== undefined) parts.push(seconds(total));
  if (finish && finish !== "stop") parts.push(finish === "length" ? "cut at max tokens" : finish);
  return parts.length ? html`<p class="facts">${parts.join(" · ")}</p>` : null;
}

function Export({ body, onClose }) {
  return html`<${Dialog} title="This request" onClose=${onClose}>
    ${[["curl", asCurl(body)], ["Python", asPython(body)]].map(
      ([name, text]) => html`<section key=${name}>
        <h3>${name} <${Copy} text=${text} /></h3>
        <pre tabindex="0"><code>${text}</code></pre>
      </section>`,
    )}
  <//>`;
}

function Answer({ answer, isLast, isBusy, onRegenerate }) {
  const [isExported, setExported] = useState(false);
  const [isMapped, setMapped] = useState(false);
  return html`<article class="message assistant" aria-label="Answer">
    ${answer.reasoning && html`<details><summary>Reasoning</summary><${Markdown} text=${answer.reasoning} /></details>`}
    ${isMapped && answer.tokens.length
      ? html`<${Heatmap} tokens=${answer.tokens} />`
      : html`<${Markdown} text=${answer.content} />`}
    ${answer.tool_calls.map(
      (each) => html`<pre class="call" tabindex="0" aria-label="Call of a tool"><code>${each.function.name}(${each.function.arguments})</code></pre>`,
    )}
    <${Facts} answer=${answer} />
    ${!(isLast && isBusy) &&
    html`<p class="actions">
      <${Copy} text=${answer.content} />
      ${isLast && html`<button type="button" class="quiet" onClick=${onRegenerate}>Regenerate</button>`}
      ${answer.tokens.length > 0 &&
      html`<button type="button" class="quiet" aria-pressed=${isMapped} onClick=${() => setMapped(!isMapped)}>Probabilities</button>`}
      <button type="button" class="quiet" onClick=${() => setExported(true)}>Export</button>
    </p>`}
    ${isExported && html`<${Export} body=${answer.body} onClose=${() => setExported(false)} />`}
  </article>`;
}

function Question({ message, isBusy, onEdit }) {
  const [draft, setDraft] = useState(null);
  if (draft === null) {
    return html`<article class="message user" aria-label="Question">
      <p class="plain">${message.content}</p>
      ${!isBusy &&
      html`<p class="actions"><button type="button" class="quiet" onClick=${() => setDraft(message.content)}>Edit</button></p>`}
    </article>`;
  }
  function save(event) {
    event.preventDefault();
    setDraft(null);
    onEdit(draft);
  }
  return html`<form class="message user" onSubmit=${save}>
    <label>Question <textarea rows="3" value=${draft} onInput=${(e) => setDraft(e.target.value)}></textarea></label>
    <p class="actions">
      <button type="button" class="quiet" onClick=${() => setDraft(null)}>Cancel</button>
      <button type="submit">Ask again</button>
    </p>
  </form>`;
}

function Pane({ pane, models, canClose, onModel, onClose, onAsk }) {
  const end = useRef(null);
  const last = pane.messages.length - 1;
  useEffect(() => {
    const list = end.current?.parentElement;
    if (list && list.scrollHeight - list.scrollTop - list.clientHeight < 160) end.current.scrollIntoView({ block: "end" });
  }, [pane.messages]);
  return html`<section class="pane" aria-label=${`Conversation with ${pane.model || "a model"}`}>
    <header>
      <label class="grow"><span class="hidden">Model</span>
        <select value=${pane.model} onChange=${(e) => onModel(e.target.value)}>
          ${models.map(
            (each) => html`<option key=${each.id} value=${each.id}>${each.id}${each.state && each.state !== "ready" ? ` (${each.state})` : ""}</option>`,
          )}
        </select>
      </label>
      ${canClose && html`<button type="button" class="quiet" aria-label="Close this conversation" onClick=${onClose}>✕</button>`}
    </header>
    <div class="messages" role="log" aria-live="off" tabindex="0" aria-label="Messages">
      ${pane.messages.length === 0 && html`<p class="hint">Ask something. Enter sends, Shift+Enter begins a new line.</p>`}
      ${pane.messages.map((message, index) =>
        message.role === "user"
          ? html`<${Question} key=${index} message=${message} isBusy=${pane.isBusy}
              onEdit=${(text) => onAsk([...pane.messages.slice(0, index), { role: "user", content: text }])} />`
          : html`<${Answer} key=${index} answer=${message} isLast=${index === last} isBusy=${pane.isBusy}
              onRegenerate=${() => onAsk(pane.messages.slice(0, index))} />`,
      )}
      <${Problem} error=${pane.error} />
      <span ref=${end}></span>
    </div>
  </section>`;
}

function Field({ name, label, settings, onChange, rows, ...rest }) {
  const shared = { value: settings[name], onInput: (e) => onChange({ ...settings, [name]: e.target.value }), ...rest };
  return html`<label>${label} ${rows ? html`<textarea rows=${rows} ...${shared}></textarea>` : html`<input ...${shared} />`}</label>`;
}

function Settings({ settings, onChange }) {
  const shared = { settings, onChange };
  const number = { type: "number", step: "any", inputmode: "decimal", placeholder: "default" };
  return html`<details class="settings">
    <summary>Settings</summary>
    <div class="fields">
      <${Field} name="system" label="System prompt" rows="2" ...${shared} />
      <${Field} name="temperature" label="Temperature" ...${number} ...${shared} />
      <${Field} name="top_p" label="Top p" ...${number} ...${shared} />
      <${Field} name="max_tokens" label="Max tokens" ...${number} ...${shared} />
      <${Field} name="seed" label="Seed" ...${number} ...${shared} />
      <${Field} name="stop" label="Stop strings, one a line" rows="2" ...${shared} />
      <${Field} name="schema" label="JSON schema of the answer" rows="3" spellcheck=${false} ...${shared} />
      <${Field} name="tools" label="Tools, as JSON" rows="3" spellcheck=${false} ...${shared} />
      <label class="check"><input type="checkbox" checked=${settings.logprobs}
        onChange=${(e) => onChange({ ...settings, logprobs: e.target.checked })} /> Probabilities of tokens</label>
    </div>
  </details>`;
}

function stored() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") };
  } catch {
    return DEFAULTS;
  }
}

// Conversations outlive a visit of another page, and end with the tab.
const kept = { panes: [emptyPane("")] };

export function Chat() {
  const [panes, setPanes] = useState(kept.panes);
  const [settings, setSettings] = useState(stored);
  const [draft, setDraft] = useState("");
  const [said, setSaid] = useState("");
  const running = useRef(new Map());
  const [listed, error, again] = usePolled(() => call("v1/models"), 15000);
  const models = (listed?.data ?? []).filter((each) => !["embed", "classify"].includes(each.task));
  const isBusy = panes.some((pane) => pane.isBusy);

  useEffect(() => localStorage.setItem(SETTINGS, JSON.stringify(settings)), [settings]);
  useEffect(() => {
    kept.panes = panes;
  }, [panes]);
  useEffect(() => () => running.current.forEach((each) => each.abort()), []);
  const first = models[0]?.id;
  useEffect(() => {
    if (first) setPanes((all) => all.map((pane) => (pane.model ? pane : { ...pane, model: first })));
  }, [first]);

  const change = (id, made) => setPanes((all) => all.map((pane) => (pane.id === id ? { ...pane, ...made(pane) } : pane)));

  async function askIn(pane, messages) {
    const abort = new AbortController();
    running.current.set(pane.id, abort);
    change(pane.id, () => ({ messages, error: null, isBusy: true }));
    try {
      const body = bodyOf(pane.model, messages, settings);
      await ask(body, abort.signal, (answer) => change(pane.id, () => ({ messages: [...messages, answer] })));
      setSaid(`${pane.model} has answered.`);
    } catch (problem) {
      change(pane.id, () => ({ error: problem }));
      if (problem.status === 404 || problem.status === 401) again();
    } finally {
      running.current.delete(pane.id);
      change(pane.id, () => ({ isBusy: false }));
    }
  }

  function send(event) {
    event?.preventDefault();
    const text = draft.trim();
    if (!text || isBusy) return;
    setDraft("");
    for (const pane of panes) askIn(pane, [...pane.messages, { role: "user", content: text }]);
  }

  function onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape") running.current.forEach((each) => each.abort());
  }

  const add = () => setPanes((all) => [...all, emptyPane(models[all.length % models.length]?.id ?? "")]);
  const clear = () => setPanes((all) => all.map((pane) => ({ ...emptyPane(pane.model) })));

  return html`<div class="chat">
    <h1 class="hidden">Chat</h1>
    <${Problem} error=${error} />
    <div class="panes">
      ${panes.map(
        (pane) => html`<${Pane} key=${pane.id} pane=${pane} models=${models} canClose=${panes.length > 1 && !pane.isBusy}
          onModel=${(model) => change(pane.id, () => ({ model }))}
          onClose=${() => setPanes((all) => all.filter((each) => each.id !== pane.id))}
          onAsk=${(messages) => askIn(pane, messages)} />`,
      )}
    </div>
    <form class="ask" onSubmit=${send}>
      <label class="grow"><span class="hidden">Message</span>
        <textarea rows="2" placeholder="Message" value=${draft} onInput=${(e) => setDraft(e.target.value)} onKeyDown=${onKey}></textarea>
      </label>
      ${isBusy
        ? html`<button type="button" class="stop" onClick=${() => running.current.forEach((each) => each.abort())}>Stop</button>`
        : html`<button type="submit" disabled=${!draft.trim() || !panes.every((pane) => pane.model)}>Send</button>`}
    </form>
    <p class="actions">
      <button type="button" class="quiet" onClick=${add} disabled=${isBusy || panes.length >= MOST_PANES || !models.length}>Compare with another model</button>
      <button type="button" class="quiet" onClick=${clear} disabled=${isBusy}>New conversation</button>
    </p>
    <${Settings} settings=${settings} onChange=${setSettings} />
    <p class="hidden" role="status">${said}</p>
  </div>`;
}
