// An answer token by token: the less probable, the stronger its colour. A chosen token shows its alternatives.
import { html, useState } from "./vendor/preact-htm.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const LEVELS = 5;
// 0 for a token that was certain, up to 5 for one that was improbable.
const level = (logprob) => Math.min(LEVELS, Math.floor(-logprob / 0.7));
const shown = (token) => token.replaceAll("\n", "⏎\n") || "∅";

export function Heatmap({ tokens }) {
  const [chosen, setChosen] = useState(0);
  const current = tokens[Math.min(chosen, tokens.length - 1)];
  return html`<div class="heatmap">
    <p class="tokens">
      ${tokens.map(
        (each, index) => html`<button key=${index} type="button" class="token level-${level(each.logprob)}"
          aria-pressed=${index === chosen} title=${percent(each.logprob)} onClick=${() => setChosen(index)}>${shown(each.token)}</button>`,
      )}
    </p>
    <table>
      <caption>Alternatives of token ${chosen + 1}</caption>
      <thead><tr><th scope="col">Token</th><th scope="col">Probability</th></tr></thead>
      <tbody>
        ${(current.top_logprobs?.length ? current.top_logprobs : [current]).map(
          (each) => html`<tr key=${each.token}><td><code>${shown(each.token)}</code></td><td>${percent(each.logprob)}</td></tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}
