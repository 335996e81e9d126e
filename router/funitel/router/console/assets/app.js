// The console: its pages by the fragment of the address.
import { html, render, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { Chat } from "./chat.js";
import { Tools, useSession } from "./tools.js";

// Pages that few visits need are loaded when they are opened.
const PAGES = {
  chat: { title: "Chat", load: async () => Chat },
  models: { title: "Models", load: async () => (await import("./models.js")).Models },
  live: { title: "Live", load: async () => (await import("./live.js")).Live },
  requests: { title: "Requests", load: async () => (await import("./requests.js")).Requests },
  access: { title: "Keys", load: async () => (await import("./access.js")).Access },
  docs: { title: "Docs", load: async () => (await import("./explorer.js")).Explorer },
};
const named = () => location.hash.slice(1).split("/")[0];
const pageOf = () => (Object.hasOwn(PAGES, named()) ? named() : "chat");

function App() {
  const [page, setPage] = useState(pageOf());
  const [Shown, setShown] = useState(() => (page === "chat" ? Chat : null));
  const [problem, setProblem] = useState("");
  const [session, setSession] = useSession();
  const main = useRef(null);
  const isFirst = useRef(true);

  useEffect(() => {
    const change = () => setPage(pageOf());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  useEffect(() => {
    let isCurrent = true;
    document.title = `${PAGES[page].title} – funitel`;
    PAGES[page].load().then(
      (found) => {
        if (!isCurrent) return;
        setProblem("");
        setShown(() => found);
        if (!isFirst.current) main.current.focus();
        isFirst.current = false;
      },
      () => isCurrent && setProblem("This page cannot be loaded: the server does not answer."),
    );
    return () => {
      isCurrent = false;
    };
  }, [page]);

  return html`
    <a class="skip" href="#main" onClick=${(e) => (e.preventDefault(), main.current.focus())}>Skip to content</a>
    <header class="top">
      <a class="brand" href="#chat"><img src="icon.svg" alt="" width="24" height="24" />funitel</a>
      <nav aria-label="Pages">
        ${Object.entries(PAGES).map(
          ([name, { title }]) =>
            html`<a key=${name} href="#${name}" aria-current=${name === page ? "page" : undefined}>${title}</a>`,
        )}
      </nav>
      <${Tools} session=${session} setSession=${setSession} />
    </header>
    <main ref=${main} id="main" tabindex="-1">
      ${problem ? html`<p class="problem" role="alert">${problem}</p>` : Shown && html`<${Shown} session=${session} />`}
    </main>
  `;
}

render(html`<${App} />`, document.getElementById("app"));
