// Answers of models as formatted text. What a model writes is hostile until DOMPurify has been through it: no images, styles,
// classes, ids or forms stay, so that an answer can neither call home nor look like a part of the page.
import { html, useEffect, useState } from "../core/lib.js";

const TAGS = ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "strong", "em", "del", "code", "pre", "blockquote", "a",
  "table", "thead", "tbody", "tr", "th", "td"];

let tools = null;

/** Resolves when `clean` can be called. */
export async function ready() {
  if (tools) return;
  const [{ marked }, { default: purify }] = await Promise.all([import("../../vendor/marked.esm.js"), import("../../vendor/purify.es.mjs")]);
  purify.addHook("afterSanitizeAttributes", (node) => {
    if (node.tagName === "A") {
      node.setAttribute("target", "_blank");
      node.setAttribute("rel", "noopener noreferrer");
    }
    if (node.tagName === "PRE") node.setAttribute("tabindex", "0");
  });
  tools = { marked, purify };
}

/** Safe HTML of a text in Markdown. */
export const clean = (text) => tools.purify.sanitize(tools.marked.parse(text, { breaks: true }), {
  ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "start"], ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
});

/** Plain until the library is there, which is fetched with the first answer. */
export function Markdown({ text }) {
  const [loaded, setLoaded] = useState(Boolean(tools));
  useEffect(() => { if (!tools) ready().then(() => setLoaded(true)); }, []);
  if (!loaded) return html`<div class="prose prose-plain">${text}</div>`;
  return html`<div class="prose" dangerouslySetInnerHTML=${{ __html: clean(text) }}></div>`;
}
