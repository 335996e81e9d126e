// The console: its pages by the fragment of the address, the API key, and the theme.
import { html, render, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { apiKey, setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { SIGNED_OUT, logIn, logOut, lookUp } from "./session.js";
import { Dialog, Problem } from "./widgets.js";

// Pages that few visits need are loaded when they are opened.
const PAGES = {
  chat: { title: "Chat", load: async () => Chat },
  models: { title: "Models", load: async () => (await import("./models.js")).Models },
  live: { title: "Live", load: async () => (await import("./live.js")).Live },
  requests: { title: "Requests", load: async () => (await import("./requests.js")).Requests },
  access: { title: "Keys", load: async () => (await import("./access.js")).Access },
  docs: { title: "Docs", load: async () => (await import("./explorer.js")).Explorer },
};
const THEMES = ["auto", "light", "dark"];
const THEME = "funitel-theme";

const named = () => location.hash.slice(1).split("/")[0];
const pageOf = () => (Object.hasOwn(PAGES, named()) ? named() : "chat");

function useTheme() {
  const [theme, setTheme] = useState(() => localStorage.getItem(THEME) ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
  }, [theme]);
  return [theme, () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])];
}

function KeyDialog({ onClose }) {
  const [key, setKey] = useState(apiKey());
  function save(event) {
    event.preventDefault();
    setApiKey(key.trim());
    onClose();
  }
  return html`<${Dialog} title="API key" onClose=${onClose}>
    <form onSubmit=${save}>
      <p>Requests of this tab are sent with this key. It is forgotten when the tab is closed.</p>
      <label>Key <input type="password" autocomplete="off" value=${key} onInput=${(e) => setKey(e.target.value)} /></label>
      <p class="actions">
        <button type="button" class="quiet" onClick=${() => setKey("")}>Clear</button>
        <button type="submit">Use this key</button>
      </p>
    </form>
  <//>`;
}

function LoginDialog({ session, onDone, onClose }) {
  const [name, setName] = useState("");
  const [password, setPassword] = useState("");
  const [error, setError] = useState(null);
  async function send(event) {
    event.preventDefault();
    setError(null);
    try {
      onDone(await logIn(name, password));
    } catch (problem) {
      setError(problem);
    }
  }
  return html`<${Dialog} title="Log in" onClose=${onClose}>
    <form onSubmit=${send}>
      <label>Name <input required autocomplete="username" value=${name} onInput=${(e) => setName(e.target.value)} /></label>
      <label>Password <input required type="password" autocomplete="current-password" value=${password} onInput=${(e) => setPassword(e.target.value)} /></label>
      <${Problem} error=${error} />
      <p class="actions">
        ${session.hasOidc && html`<a class="button" href="../v1/auth/oidc/login">Log in at the provider</a>`}
        <button type="submit">Log in</button>
      </p>
    </form>
  <//>`;
}

function useSession() {
  const [session, setSession] = useState({ isOn: false, user: null, hasOidc: false });
  useEffect(() => {
    lookUp().then(setSession, () => {});
  }, []);
  const leave = () => logOut().then(() => setSession((now) => ({ ...SIGNED_OUT, hasOidc: now.hasOidc })), () => {});
  return [session, setSession, leave];
}

function App() {
  const [page, setPage] = useState(pageOf());
  const [Shown, setShown] = useState(() => (page === "chat" ? Chat : null));
  const [problem, setProblem] = useState("");
  const [asksKey, setAsksKey] = useState(false);
  const [asksLogin, setAsksLogin] = useState(false);
  const [session, setSession, leave] = useSession();
  const [theme, nextTheme] = useTheme();
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
      <span class="tools">
        <button type="button" class="quiet" onClick=${nextTheme}>Theme: ${theme}</button>
        ${!session.user && html`<button type="button" class="quiet" onClick=${() => setAsksKey(true)}>API key</button>`}
        ${session.isOn && !session.user && html`<button type="button" class="quiet" onClick=${() => setAsksLogin(true)}>Log in</button>`}
        ${session.user && html`<button type="button" class="quiet" onClick=${leave}>Log out ${session.user.name}</button>`}
      </span>
    </header>
    <main ref=${main} id="main" tabindex="-1">
      ${problem ? html`<p class="problem" role="alert">${problem}</p>` : Shown && html`<${Shown} session=${session} />`}
    </main>
    ${asksLogin && html`<${LoginDialog} session=${session} onClose=${() => setAsksLogin(false)} onDone=${(found) => (setSession(found), setAsksLogin(false))} />`}
    ${asksKey && html`<${KeyDialog} onClose=${() => setAsksKey(false)} />`}
  `;
}

render(html`<${App} />`, document.getElementById("app"));
