// What the server does now and did in the last hour, for each model and replica, and the requests that run.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { call, path } from "./api.js";
import { Problem, count, seconds, usePolled } from "./widgets.js";

const HOUR = 3600;
const HEIGHT = 160;
const COLORS = ["#2a7fd4", "#b86e00", "#2a9350", "#c2479a", "#7a6ee0", "#d0503f"]; // seen on a light and a dark ground

let plotting = null;
// uPlot is a classic script that makes one global.
function plots() {
  plotting ??= new Promise((resolve, reject) => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "vendor/uplot.css" });
    const script = Object.assign(document.createElement("script"), { src: "vendor/uplot.js" });
    script.onload = () => resolve(globalThis.uPlot);
    script.onerror = reject;
    document.head.append(style, script);
  });
  return plotting;
}

// The difference of two samples by the time between them; null where the counts begin anew.
function rates(samples, read) {
  return samples.map((sample, i) => {
    if (i === 0) return null;
    const grown = read(sample) - read(samples[i - 1]);
    return grown < 0 ? null : grown / (sample.time - samples[i - 1].time);
  });
}

function ratios(samples, above, below) {
  return samples.map((sample, i) => {
    if (i === 0) return null;
    const whole = below(sample) - below(samples[i - 1]);
    const part = above(sample) - above(samples[i - 1]);
    return whole > 0 && part >= 0 ? part / whole : null;
  });
}

// Each picture has a series for each model.
const PICTURES = [
  { title: "Generated tokens a second", of: (all) => rates(all, (s) => s.generated_tokens) },
  { title: "Running sequences", of: (all) => all.map((s) => s.running) },
  { title: "Waiting sequences", of: (all) => all.map((s) => s.waiting) },
  { title: "KV memory in use, %", of: (all) => all.map((s) => 100 * s.kv_utilisation) },
  { title: "Prompt tokens found in the cache, %", of: (all) => ratios(all, (s) => s.cached_tokens, (s) => s.queried_tokens).map((r) => (r === null ? null : 100 * r)) },
  { title: "Time of a step, ms", of: (all) => ratios(all, (s) => s.step_seconds, (s) => s.steps).map((r) => (r === null ? null : 1000 * r)) },
];

function Picture({ title, models, samples, of }) {
  const place = useRef(null);
  const plot = useRef(null);
  const names = models.join("\n");
  useEffect(() => {
    let isOver = false;
    plots().then((Plot) => {
      if (isOver || !place.current) return;
      const ink = getComputedStyle(document.documentElement).getPropertyValue("--soft");
      const clock = (_, splits) => splits.map((time) => new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false }));
      const axis = { stroke: ink, grid: { stroke: "rgba(128,128,128,.2)" }, ticks: { show: false } };
      plot.current = new Plot(
        {
          width: place.current.clientWidth,
          height: HEIGHT,
          legend: { show: models.length > 1 },
          cursor: { y: false },
          scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(1, (high ?? 0) * 1.1)] } },
          axes: [{ ...axis, values: clock, space: 70 }, { ...axis, size: 54 }],
          series: [{}, ...models.map((label, i) => ({ label, stroke: COLORS[i % COLORS.length], width: 2, spanGaps: false, points: { show: false } }))],
        },
        [[], ...models.map(() => [])],
        place.current,
      );
      draw();
    }, () => {});
    const resize = () => plot.current?.setSize({ width: place.current.clientWidth, height: HEIGHT });
    addEventListener("resize", resize);
    return () => {
      isOver = true;
      removeEventListener("resize", resize);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [names]);
  function draw() {
    const times = [...new Set(models.flatMap((name) => (samples[name] ?? []).map((s) => s.time)))].sort((a, b) => a - b);
    const columns = models.map((name) => {
      const all = samples[name] ?? [];
      const values = of(all);
      const at = new Map(all.map((sample, i) => [sample.time, values[i]]));
      return times.map((time) => at.get(time) ?? null);
    });
    plot.current?.setData([times, ...columns]);
  }
  useEffect(draw, [samples]);
  const last = models.map((name) => of(samples[name] ?? []).at(-1)).filter((value) => value !== null && value !== undefined);
  const sum = last.reduce((a, b) => a + b, 0);
  return html`<figure>
    <figcaption>${title}<b>${last.length ? sum.toFixed(sum < 10 ? 1 : 0) : "–"}</b></figcaption>
    <div class="plot" ref=${place} aria-hidden="true"></div>
  </figure>`;
}

function Running({ requests, again }) {
  const [problem, setProblem] = useState(null);
  async function cancel(id) {
    setProblem(null);
    try {
      await call(`v1/requests/${path(id)}`, { method: "DELETE" });
    } catch (failed) {
      setProblem(failed);
    }
    again();
  }
  return html`<section>
    <h2>Requests under way</h2>
    <${Problem} error=${problem} />
    ${requests.length === 0
      ? html`<p class="hint">None.</p>`
      : html`<div class="scrolled" tabindex="0" role="region" aria-label="Requests under way"><table>
          <thead><tr><th scope="col">Id</th><th scope="col">State</th><th scope="col">Age</th><th scope="col">Prompt</th><th scope="col">Tokens</th><th scope="col">Key</th><th scope="col"><span class="hidden">Cancel</span></th></tr></thead>
          <tbody>
            ${requests.map(
              (each) => html`<tr key=${each.id}><td><code>${each.response_id ?? each.id}</code></td><td>${each.state}</td><td>${seconds(each.age_seconds)}</td>
                <td>${count(each.prompt_tokens)}</td><td>${count(each.tokens)}</td><td>${each.key ?? ""}</td>
                <td><button type="button" class="quiet" aria-label="Cancel ${each.id}" onClick=${() => cancel(each.id)}>Cancel</button></td></tr>`,
            )}
          </tbody>
        </table></div>`}
  </section>`;
}

export function Live() {
  const samples = useRef({});
  const since = useRef(0);
  const [state, error, again] = usePolled(async () => {
    const found = await call(`v1/console/live?requests=true&since=${since.current}`);
    const begin = found.time - HOUR;
    const merged = {};
    for (const model of found.models) {
      const before = samples.current[model.name] ?? [];
      merged[model.name] = [...before, ...model.samples].filter((each) => each.time >= begin);
      since.current = Math.max(since.current, model.samples.at(-1)?.time ?? 0);
    }
    samples.current = merged;
    return { ...found, samples: merged };
  }, 3000);
  const models = state?.models ?? [];
  const replicas = models.flatMap((model) => model.replicas.map((each) => ({ ...each, model: model.name })));
  return html`<div class="live">
    <h1>Live</h1>
    <${Problem} error=${error} />
    ${state &&
    html`<div class="pictures">
      ${PICTURES.map((each) => html`<${Picture} key=${each.title} ...${each} models=${models.map((m) => m.name)} samples=${state.samples} />`)}
    </div>
    <section>
      <h2>Totals since the server began</h2>
      <div class="scrolled" tabindex="0" role="region" aria-label="Totals"><table id="totals">
        <thead><tr><th scope="col">Model</th><th scope="col">Requests</th><th scope="col">Running</th><th scope="col">Waiting</th><th scope="col">Prompt tokens</th><th scope="col">Cached</th><th scope="col">Generated</th><th scope="col">Steps</th><th scope="col">KV in use</th></tr></thead>
        <tbody>
          ${models.map(
            ({ name, now }) => html`<tr key=${name}><th scope="row">${name}</th><td>${count(now.requests)}</td><td>${count(now.running)}</td><td>${count(now.waiting)}</td>
              <td>${count(now.queried_tokens)}</td><td>${count(now.cached_tokens)}</td><td>${count(now.generated_tokens)}</td><td>${count(now.steps)}</td><td>${(100 * now.kv_utilisation).toFixed(1)} %</td></tr>`,
          )}
        </tbody>
      </table></div>
    </section>
    <section>
      <h2>Replicas</h2>
      <div class="scrolled" tabindex="0" role="region" aria-label="Replicas"><table>
        <thead><tr><th scope="col">Model</th><th scope="col">Replica</th><th scope="col">Up</th><th scope="col">Running</th><th scope="col">Waiting</th><th scope="col">KV in use</th><th scope="col">Generated</th><th scope="col">Losses</th></tr></thead>
        <tbody>
          ${replicas.map(
            (each) => html`<tr key=${`${each.model} ${each.replica_id}`}><th scope="row">${each.model}</th><td>${each.replica_id}</td><td>${each.is_up ? "yes" : "no"}</td>
              <td>${count(each.running)}</td><td>${count(each.waiting)}</td><td>${(100 * each.kv_utilisation).toFixed(1)} %</td><td>${count(each.generated_tokens)}</td><td>${count(each.losses)}</td></tr>`,
          )}
        </tbody>
      </table></div>
    </section>`}
    <${Running} requests=${state?.requests ?? []} again=${again} />
  </div>`;
}
