// The requests that ended last, with the time that each spent in the queue, before its first token, and after it.
import { html, useState } from "./vendor/preact-htm.js";
import { call } from "./api.js";
import { Problem, count, seconds, usePolled } from "./widgets.js";

const PHASES = [
  ["arrival_seconds", "arrival", "tokenized and validated"],
  ["queue_seconds", "queue", "waited"],
  ["prefill_seconds", "prefill", "until the first token"],
  ["decode_seconds", "decode", "from the first token to the last"],
];

function Timeline({ request, longest }) {
  const parts = PHASES.filter(([name]) => request[name]);
  const total = request.total_seconds || 1e-9;
  const said = parts.map(([name, , what]) => `${what} ${seconds(request[name])}`).join(", ");
  return html`<svg class="timeline" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label=${said || "no work"}>
    ${parts.reduce(
      ([made, at], [name, phase]) => {
        const width = (100 * request[name]) / longest;
        return [[...made, html`<rect key=${phase} class=${phase} x=${at} y="0" width=${Math.max(width, 0.3)} height="8" />`], at + width];
      },
      [[], 0],
    )[0]}
    <title>${said || `${seconds(total)}`}</title>
  </svg>`;
}

export function Requests() {
  const [found, error] = usePolled(() => call("v1/console/requests"), 2000);
  const [filter, setFilter] = useState("");
  const wanted = filter.toLowerCase();
  const shown = (found?.requests ?? []).filter((each) =>
    [each.id, each.route, each.model, each.key, each.error, String(each.status), each.finish].some((text) => text?.toLowerCase().includes(wanted)),
  );
  const longest = Math.max(1e-9, ...shown.map((each) => each.total_seconds));
  return html`<div class="requests">
    <h1>Requests</h1>
    <${Problem} error=${error} />
    <p class="legend" aria-hidden="true">${PHASES.map(([, phase, what]) => html`<span key=${phase} class=${phase}>${what}</span>`)}</p>
    <label>Filter <input type="search" value=${filter} placeholder="id, route, model, key, status, error" onInput=${(e) => setFilter(e.target.value)} /></label>
    <div class="scrolled" tabindex="0" role="region" aria-label="Requests that ended"><table>
      <thead><tr><th scope="col">Ended</th><th scope="col">Route</th><th scope="col">Model</th><th scope="col">Status</th><th scope="col">Timeline</th><th scope="col">Total</th><th scope="col">First token</th><th scope="col">Tokens</th><th scope="col">Key</th><th scope="col">Id</th></tr></thead>
      <tbody>
        ${shown.map(
          (each) => html`<tr key=${each.serial}>
            <td><time>${new Date(each.ended * 1000).toLocaleTimeString()}</time></td><td>${each.route}</td><td>${each.model ?? ""}</td>
            <td class=${each.status >= 400 ? "failed" : ""}>${each.status} ${each.error ?? each.finish ?? ""}</td>
            <td><${Timeline} request=${each} longest=${longest} /></td><td>${seconds(each.total_seconds)}</td><td>${seconds(each.first_token_seconds)}</td>
            <td>${each.prompt_tokens === null ? "" : `${count(each.prompt_tokens)}${each.cached_tokens ? ` (${count(each.cached_tokens)} cached)` : ""} + ${count(each.tokens)}`}</td>
            <td>${each.key ?? ""}</td><td><code>${each.id}</code></td>
          </tr>`,
        )}
      </tbody>
    </table></div>
    ${found && shown.length === 0 && html`<p class="hint">None.</p>`}
  </div>`;
}
