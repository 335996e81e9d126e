// Tools of every page: the theme, the API key, and the session.
import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { apiKey, root, setApiKey } from "./api.js";
import { SIGNED_OUT, logIn, logOut, lookUp } from "./session.js";
import { Dialog, Problem } from "./widgets.js";

const THEMES = ["auto", "light", "dark"];
const THEME = "funitel-theme";

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
        ${session.hasOidc && html`<a class="button" href=${new URL("v1/auth/oidc/login", root)}>Log in at the provider</a>`}
        <button type="submit">Log in</button>
      </p>
    </form>
  <//>`;
}

export function useSession() {
  const [session, setSession] = useState({ isOn: false, user: null, hasOidc: false });
  useEffect(() => {
    lookUp().then(setSession, () => {});
  }, []);
  return [session, setSession];
}

export function Tools({ session, setSession }) {
  const [asksKey, setAsksKey] = useState(false);
  const [asksLogin, setAsksLogin] = useState(false);
  const [theme, nextTheme] = useTheme();
  const leave = () => logOut().then(() => setSession((now) => ({ ...SIGNED_OUT, hasOidc: now.hasOidc })), () => {});
  return html`<span class="tools">
    <button type="button" class="quiet" onClick=${nextTheme}>Theme: ${theme}</button>
    ${!session.user && html`<button type="button" class="quiet" onClick=${() => setAsksKey(true)}>API key</button>`}
    ${session.isOn && !session.user && html`<button type="button" class="quiet" onClick=${() => setAsksLogin(true)}>Log in</button>`}
    ${session.user && html`<button type="button" class="quiet" onClick=${leave}>Log out ${session.user.name}</button>`}
    ${asksLogin && html`<${LoginDialog} session=${session} onClose=${() => setAsksLogin(false)} onDone=${(found) => (setSession(found), setAsksLogin(false))} />`}
    ${asksKey && html`<${KeyDialog} onClose=${() => setAsksKey(false)} />`}
  </span>`;
}
