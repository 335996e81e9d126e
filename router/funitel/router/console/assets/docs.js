// The page /docs: the routes of the server, each with a form that sends a request, without the rest of the console.
import { html, render } from "./vendor/preact-htm.js";
import { root } from "./api.js";
import { Explorer } from "./explorer.js";
import { Tools, useSession } from "./tools.js";

function Page() {
  const [session, setSession] = useSession();
  return html`
    <header class="top">
      <a class="brand" href=${new URL("ui/", root)}><img src=${new URL("ui/icon.svg", root)} alt="" width="24" height="24" />funitel</a>
      <${Tools} session=${session} setSession=${setSession} />
    </header>
    <main id="main"><${Explorer} /></main>
  `;
}

render(html`<${Page} />`, document.getElementById("app"));
