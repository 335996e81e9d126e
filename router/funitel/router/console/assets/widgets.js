// Small parts that several pages use.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

export const bytes = (count) => {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  let size = count;
  while (size >= 1024 && power < units.length - 1) {
    size /= 1024;
    power += 1;
  }
  return `${power ? size.toFixed(1) : size} ${units[power]}`;
};

export const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : value < 90 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
};

export const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));

export function Problem({ error }) {
  return error ? html`<p class="problem" role="alert">${error.message ?? error}</p>` : null;
}

// What `load` gives, again every `interval` milliseconds while the page is seen, and the error of the last attempt.
export function usePolled(load, interval) {
  const [state, setState] = useState({ value: null, error: null });
  const again = useRef(() => {});
  const latest = useRef(load);
  latest.current = load;
  useEffect(() => {
    let timer = null;
    let isOver = false;
    async function step() {
      clearTimeout(timer);
      if (!document.hidden) {
        try {
          const value = await latest.current();
          if (!isOver) setState({ value, error: null });
        } catch (error) {
          if (!isOver) setState((before) => ({ ...before, error }));
        }
      }
      if (!isOver) timer = setTimeout(step, interval);
    }
    again.current = step;
    step();
    addEventListener("funitel-key", step);
    document.addEventListener("visibilitychange", step);
    return () => {
      isOver = true;
      clearTimeout(timer);
      removeEventListener("funitel-key", step);
      document.removeEventListener("visibilitychange", step);
    };
  }, []);
  return [state.value, state.error, () => again.current()];
}

export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  useEffect(() => {
    element.current.showModal();
  }, []);
  return html`<dialog ref=${element} onClose=${onClose} aria-labelledby="dialog-title">
    <div class="dialog-head">
      <h2 id="dialog-title">${title}</h2>
      <button type="button" class="quiet" aria-label="Close" onClick=${() => element.current.close()}>✕</button>
    </div>
    ${children}
  </dialog>`;
}

export function Copy({ text, label = "Copy" }) {
  const [isDone, setDone] = useState(false);
  async function copy() {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  }
  return html`<button type="button" class="quiet" onClick=${copy}>${isDone ? "Copied" : label}</button>`;
}

export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
