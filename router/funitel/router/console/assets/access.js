// Keys and usage: the keys of a user, what they have used, and for admins users, prices and the audit.
import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { call, path } from "./api.js";
import { Copy, Dialog, Problem, count, usePolled } from "./widgets.js";

const LIMITS = [
  ["requests_per_minute", "Requests a minute"],
  ["tokens_per_minute", "Tokens a minute"],
  ["max_concurrent_requests", "Requests at once"],
  ["requests_per_month", "Requests a month"],
  ["tokens_per_month", "Tokens a month"],
  ["budget_per_month", "Budget a month"],
];

const when = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "");
const words = (text) => text.split(/[\s,]+/).filter(Boolean);
const limitsText = (limits) =>
  LIMITS.filter(([name]) => limits[name] !== null)
    .map(([name, label]) => `${label}: ${count(limits[name])}`)
    .join(", ") || "none";

function Limits({ values, onChange }) {
  return html`<fieldset class="fields">
    <legend>Limits; empty is none</legend>
    ${LIMITS.map(
      ([name, label]) => html`<label key=${name}>${label}
        <input type="number" min=${name === "budget_per_month" ? 0 : 1} step=${name === "budget_per_month" ? "any" : 1} value=${values[name] ?? ""}
          onInput=${(e) => onChange({ ...values, [name]: e.target.value === "" ? null : Number(e.target.value) })} /></label>`,
    )}
  </fieldset>`;
}

// A form in a dialog that sends one request; `send` gives its promise.
function Form({ title, label, send, onClose, children }) {
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await send();
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
    }
  }
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <form onSubmit=${submit}>
      ${children}
      <${Problem} error=${error} />
      <p class="actions"><button type="submit" disabled=${isBusy}>${label}</button></p>
    </form>
  <//>`;
}

function KeyText({ text, onClose }) {
  return html`<${Dialog} title="The key" onClose=${onClose}>
    <p>It is shown this once. The server keeps only its hash.</p>
    <p><code class="key">${text}</code> <${Copy} text=${text} /></p>
  <//>`;
}

function KeyForm({ known, users, onDone, onClose }) {
  const [name, setName] = useState(known?.name ?? "");
  const [user, setUser] = useState(known?.user ?? "");
  const [routes, setRoutes] = useState(known?.routes.join(" ") ?? "");
  const [models, setModels] = useState(known?.models.join(" ") ?? "");
  const [expires, setExpires] = useState("");
  const [limits, setLimits] = useState(known?.limits ?? {});
  async function send() {
    const body = { name, routes: words(routes), models: words(models), limits };
    if (expires) body.expires = expires;
    if (user && !known) body.user = user;
    const target = known ? `v1/keys/${known.id}` : "v1/keys";
    onDone(await call(target, { method: known ? "PATCH" : "POST", body }));
  }
  return html`<${Form} title=${known ? `Change ${known.name}` : "New key"} label=${known ? "Change" : "Make the key"} send=${send} onClose=${onClose}>
    <div class="fields">
      <label>Name <input required value=${name} onInput=${(e) => setName(e.target.value)} /></label>
      ${!known &&
      users.length > 1 &&
      html`<label>User <select value=${user} onChange=${(e) => setUser(e.target.value)}>
        <option value="">me</option>${users.map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}</select></label>`}
      <label>Routes <input value=${routes} placeholder="all" onInput=${(e) => setRoutes(e.target.value)} /></label>
      <label>Models <input value=${models} placeholder="all" onInput=${(e) => setModels(e.target.value)} /></label>
      <label>Expires <input type="date" value=${expires} onInput=${(e) => setExpires(e.target.value)} /></label>
    </div>
    <${Limits} values=${limits} onChange=${setLimits} />
  <//>`;
}

function Keys({ isAdmin, users }) {
  const [found, error, again] = usePolled(() => call("v1/keys"), 5000);
  const [shown, setShown] = useState(null);
  const [problem, setProblem] = useState(null);
  async function act(target, options) {
    setProblem(null);
    try {
      const answer = await call(target, options);
      if (answer?.key) setShown({ text: answer.key });
    } catch (failure) {
      setProblem(failure);
    }
    again();
  }
  const state = (key) => (key.revoked ? `revoked ${when(key.revoked)}` : key.is_banned ? "banned" : key.expires ? `${key.expires * 1000 < Date.now() ? "expired" : "until"} ${when(key.expires)}` : "valid");
  const button = (label, key, onClick) => html`<button type="button" class="quiet" aria-label=${`${label} ${key.name}`} onClick=${onClick}>${label}</button>`;
  return html`<section>
    <h2>Keys</h2>
    <${Problem} error=${problem ?? error} />
    <p class="actions"><button type="button" onClick=${() => setShown({ form: true })}>New key</button></p>
    <div class="scrolled" tabindex="0" role="region" aria-label="Keys"><table>
      <thead><tr><th scope="col">Name</th><th scope="col">User</th><th scope="col">Key</th><th scope="col">State</th><th scope="col">Routes</th><th scope="col">Models</th><th scope="col">Limits</th><th scope="col"><span class="hidden">Actions</span></th></tr></thead>
      <tbody>
        ${(found?.keys ?? []).map(
          (key) => html`<tr key=${key.id}>
            <td>${key.name}</td><td>${key.user}</td><td><code>…${key.hint}</code></td><td>${state(key)}</td>
            <td>${key.routes.join(" ") || "all"}</td><td>${key.models.join(" ") || "all"}</td><td>${limitsText(key.limits)}</td>
            <td>${!key.revoked &&
            html`<span class="actions">
              ${button("Change", key, () => setShown({ form: true, known: key }))}
              ${button("Rotate", key, () => act(`v1/keys/${key.id}/rotate`, { method: "POST" }))}
              ${isAdmin && button(key.is_banned ? "Unban" : "Ban", key, () => act(`v1/keys/${key.id}`, { method: "PATCH", body: { is_banned: !key.is_banned } }))}
              ${button("Revoke", key, () => act(`v1/keys/${key.id}`, { method: "DELETE" }))}
            </span>`}</td>
          </tr>`,
        )}
      </tbody>
    </table></div>
    ${shown?.text && html`<${KeyText} text=${shown.text} onClose=${() => setShown(null)} />`}
    ${shown?.form &&
    html`<${KeyForm} known=${shown.known} users=${users} onClose=${() => setShown((now) => (now?.text ? now : null))}
      onDone=${(answer) => (setShown(answer.key ? { text: answer.key } : null), again())} />`}
  </section>`;
}

function Usage() {
  const [found, error] = usePolled(() => call("v1/usage"), 10000);
  const rows = found?.usage ?? [];
  return html`<section>
    <h2>Usage</h2>
    <${Problem} error=${error} />
    ${found && html`<p class="hint">Days of UTC from ${found.first} to ${found.last}</p>`}
    <div class="scrolled" tabindex="0" role="region" aria-label="Usage"><table>
      <thead><tr><th scope="col">Day</th><th scope="col">User</th><th scope="col">Key</th><th scope="col">Model</th><th scope="col">Requests</th><th scope="col">Prompt tokens</th><th scope="col">Completion tokens</th><th scope="col">Unsettled</th><th scope="col">Cost</th></tr></thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr key=${`${row.day} ${row.user} ${row.key} ${row.model}`}>
            <td>${row.day}</td><td>${row.user}</td><td>${row.key_name || "session"}</td><td>${row.model}</td><td>${count(row.requests)}</td>
            <td>${count(row.prompt_tokens)}</td><td>${count(row.completion_tokens)}</td><td>${count(row.unsettled_tokens)}</td><td>${count(row.cost)}</td>
          </tr>`,
        )}
      </tbody>
    </table></div>
    ${found && rows.length === 0 && html`<p class="hint">None.</p>`}
  </section>`;
}

function UserForm({ known, onDone, onClose }) {
  const [name, setName] = useState(known?.name ?? "");
  const [role, setRole] = useState(known?.role ?? "user");
  const [password, setPassword] = useState("");
  const [limits, setLimits] = useState(known?.limits ?? {});
  async function send() {
    if (known) {
      await call(`v1/users/${path(known.name)}`, { method: "PATCH", body: { role, limits } });
      if (password) await call(`v1/users/${path(known.name)}/password`, { method: "POST", body: { password } });
    } else {
      const body = { name, role, limits };
      if (password) body.password = password;
      await call("v1/users", { method: "POST", body });
    }
    onDone();
  }
  return html`<${Form} title=${known ? `Change ${known.name}` : "New user"} label=${known ? "Change" : "Add"} send=${send} onClose=${onClose}>
    <div class="fields">
      ${!known && html`<label>Name <input required value=${name} autocomplete="off" onInput=${(e) => setName(e.target.value)} /></label>`}
      <label>Role <select value=${role} onChange=${(e) => setRole(e.target.value)}>${["user", "operator", "admin"].map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>
      <label>Password <input type="password" autocomplete="new-password" minlength="10" value=${password} placeholder=${known ? "unchanged" : "none: keys only"} onInput=${(e) => setPassword(e.target.value)} /></label>
    </div>
    <${Limits} values=${limits} onChange=${setLimits} />
  <//>`;
}

function Users({ found, error, again }) {
  const [shown, setShown] = useState(null);
  const [problem, setProblem] = useState(null);
  async function act(...given) {
    setProblem(null);
    try {
      await call(...given);
    } catch (failure) {
      setProblem(failure);
    }
    setShown(null);
    again();
  }
  const of = (user) => `v1/users/${path(user.name)}`;
  return html`<section>
    <h2>Users</h2>
    <${Problem} error=${problem ?? error} />
    <p class="actions"><button type="button" onClick=${() => setShown({ form: true })}>New user</button></p>
    <div class="scrolled" tabindex="0" role="region" aria-label="Users"><table>
      <thead><tr><th scope="col">Name</th><th scope="col">Role</th><th scope="col">State</th><th scope="col">Limits</th><th scope="col"><span class="hidden">Actions</span></th></tr></thead>
      <tbody>
        ${(found?.users ?? []).map(
          (user) => html`<tr key=${user.name}>
            <td>${user.name}</td><td>${user.role}</td>
            <td>${user.is_disabled ? "disabled" : user.subject ? "OpenID Connect" : user.has_password ? "password" : "keys only"}</td><td>${limitsText(user.limits)}</td>
            <td><span class="actions">
              <button type="button" class="quiet" aria-label="Change ${user.name}" onClick=${() => setShown({ form: true, known: user })}>Change</button>
              <button type="button" class="quiet" aria-label="${user.is_disabled ? "Enable" : "Disable"} ${user.name}"
                onClick=${() => act(of(user), { method: "PATCH", body: { is_disabled: !user.is_disabled } })}>${user.is_disabled ? "Enable" : "Disable"}</button>
              <button type="button" class="quiet" aria-label="Delete ${user.name}" onClick=${() => setShown({ deletes: user })}>Delete</button>
            </span></td>
          </tr>`,
        )}
      </tbody>
    </table></div>
    ${shown?.form && html`<${UserForm} known=${shown.known} onClose=${() => setShown(null)} onDone=${() => (setShown(null), again())} />`}
    ${shown?.deletes &&
    html`<${Dialog} title="Delete ${shown.deletes.name}?" onClose=${() => setShown(null)}>
      <p>The keys of the user are revoked. What they have used stays in the records.</p>
      <p class="actions"><button type="button" onClick=${() => act(of(shown.deletes), { method: "DELETE" })}>Delete</button></p>
    <//>`}
  </section>`;
}

function Prices() {
  const [found, error, again] = usePolled(() => call("v1/prices"), 30000);
  const [fields, setFields] = useState({ model: "", prompt: "", completion: "" });
  const [problem, setProblem] = useState(null);
  async function save(event) {
    event.preventDefault();
    setProblem(null);
    try {
      const body = { model: fields.model.trim(), prompt: Number(fields.prompt), completion: Number(fields.completion) };
      await call("v1/prices", { method: "POST", body });
      setFields({ model: "", prompt: "", completion: "" });
      again();
    } catch (failure) {
      setProblem(failure);
    }
  }
  const field = (name, label, rest) => html`<label>${label} <input required value=${fields[name]} onInput=${(e) => setFields({ ...fields, [name]: e.target.value })} ...${rest} /></label>`;
  const number = { type: "number", min: 0, step: "any" };
  return html`<section>
    <h2>Prices</h2>
    <p class="hint">Of a million tokens, in the unit of the budgets.</p>
    <${Problem} error=${problem ?? error} />
    <table>
      <caption class="hidden">Prices</caption>
      <thead><tr><th scope="col">Model</th><th scope="col">Prompt</th><th scope="col">Completion</th></tr></thead>
      <tbody>${(found?.prices ?? []).map((each) => html`<tr key=${each.model}><td>${each.model}</td><td>${each.prompt}</td><td>${each.completion}</td></tr>`)}</tbody>
    </table>
    <form onSubmit=${save}>
      <div class="fields">${field("model", "Model")}${field("prompt", "Prompt", number)}${field("completion", "Completion", number)}</div>
      <p class="actions"><button type="submit">Set the price</button></p>
    </form>
  </section>`;
}

function Audit() {
  const [found, error] = usePolled(() => call("v1/audit?limit=200"), 10000);
  const shown = (value) => (value ? JSON.stringify(value, null, 1) : "nothing");
  return html`<section>
    <h2>Audit</h2>
    <${Problem} error=${error} />
    <div class="scrolled" tabindex="0" role="region" aria-label="Audit"><table>
      <thead><tr><th scope="col">At</th><th scope="col">Actor</th><th scope="col">Action</th><th scope="col">Object</th><th scope="col">Status</th><th scope="col">Before and after</th></tr></thead>
      <tbody>
        ${(found?.audit ?? []).map(
          (row) => html`<tr key=${row.place}>
            <td><time>${when(row.at)}</time></td><td>${row.actor} ${row.address}</td><td>${row.action}</td><td>${row.object}</td><td>${row.status ?? "began"}</td>
            <td><details><summary>Show</summary><pre>${shown(row.before)}</pre><pre>${shown(row.after)}</pre></details></td>
          </tr>`,
        )}
      </tbody>
    </table></div>
  </section>`;
}

export function Access({ session }) {
  const isAdmin = session.user?.role === "admin";
  const [users, error, again] = usePolled(() => (session.user ? call("v1/users") : Promise.resolve(null)), 10000);
  useEffect(() => {
    again();
  }, [session.user?.name]);
  if (!session.isOn) {
    return html`<div class="access"><h1>Keys and usage</h1>
      <p>This server has no users. Start it with <code>--users</code>, and add the first one with <code>funitel user new NAME --role admin</code>.</p></div>`;
  }
  if (!session.user) return html`<div class="access"><h1>Keys and usage</h1><p>Log in to see your keys and what they have used.</p></div>`;
  return html`<div class="access">
    <h1>Keys and usage</h1>
    <${Keys} isAdmin=${isAdmin} users=${isAdmin ? users?.users ?? [] : []} />
    <${Usage} />
    ${isAdmin && html`<${Users} found=${users} error=${error} again=${again} /><${Prices} /><${Audit} />`}
  </div>`;
}
