// What a request of the forms took.
import { count, money, ms, neurons } from "../core/format.js";
import { html } from "../core/lib.js";
import { link } from "../core/router.js";

/** @param {{done: {result: any, request: string, ms: number}}} props */
export function Outcome({ done }) {
  const usage = done.result?.usage ?? {};
  const rows = [
    ["Took", ms(done.ms)],
    ["Tokens", usage.total_tokens !== undefined && count(usage.total_tokens)],
    ["Neurons", usage.neurons !== undefined && neurons(usage.neurons)],
    ["Cost", usage.cost && money(usage.cost)],
  ].filter(([, value]) => value);
  return html`<dl class="stats">${rows.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
    <div><dt class="sr-only">Request</dt><dd><a href=${link("requests", done.request)}>Request</a></dd></div></dl>`;
}
