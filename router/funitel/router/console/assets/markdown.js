// A model's answer as HTML. Every answer is hostile: marked makes HTML of it, and DOMPurify keeps what is harmless.
import { html, useMemo } from "./vendor/preact-htm.js";
import { marked } from "./vendor/marked.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."p br hr h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong del a table thead tbody tr th td sup sub".split(" "),
  ],
  ALLOWED_ATTR: ["href", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

let isPrepared = false;

function prepare() {
  // Headings of an answer are below those of the page; a link opens a tab that cannot reach this one.
  globalThis.DOMPurify.addHook("afterSanitizeAttributes", (node) => {
    if (node.tagName !== "A") return;
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  });
  marked.use({
    gfm: true,
    breaks: true,
    walkTokens(token) {
      if (token.type === "heading") token.depth = Math.min(6, token.depth + 3);
    },
  });
  isPrepared = true;
}

export function safeHtml(text) {
  if (!isPrepared) prepare();
  return globalThis.DOMPurify.sanitize(marked.parse(text), ALLOWED);
}

export function Markdown({ text }) {
  const made = useMemo(() => safeHtml(text), [text]);
  return html`<div class="markdown" dangerouslySetInnerHTML=${{ __html: made }}></div>`;
}
