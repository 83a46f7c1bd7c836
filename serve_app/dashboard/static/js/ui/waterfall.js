// Where the time of a request went.
import { html } from "../core/lib.js";
import { ms } from "../core/format.js";
import { spans } from "../core/path.js";

/** @param {{path: Object}} props  an answer of GET /v1/requests/{id} */
export function Waterfall({ path }) {
  const list = spans(path);
  const end = Math.max(...list.map((one) => one.to), 0.001);
  return html`<ul class="waterfall" aria-label="Where the time went">${list.map((one) => html`<li class="span-row" key=${one.name} title=${one.note}>
    <span>${one.name}</span>
    <span class="span-track" aria-hidden="true"><span class=${`span-bar span-${one.series}`} style=${{ left: `${(one.from / end) * 100}%`, width: `${((one.to - one.from) / end) * 100}%` }}></span></span>
    <span class="num right">${ms(one.to - one.from)}</span></li>`)}</ul>`;
}
