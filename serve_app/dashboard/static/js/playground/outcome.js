// What a request of the forms took, and what it cost: by its answer, or by the ledger where an answer has no place for it.
import { ai, get } from "../core/api.js";
import { count, money, ms, neurons } from "../core/format.js";
import { html, useEffect, useState } from "../core/lib.js";
import { link } from "../core/router.js";
import { can } from "../core/session.js";

const PATIENCE = 8;

/** The receipt of a request that has just ended, which the ledger has a moment later; null if it is not there in time. */
async function receiptOf(id, signal) {
  for (let tries = 0; tries < PATIENCE; tries += 1) {
    try {
      return await get(ai(`/usage/${encodeURIComponent(id)}`), {}, { signal });
    } catch (error) {
      if (error.status !== 404) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
  return null;
}

/** @param {{done: {result: any, request: string, ms: number}}} props */
export function Outcome({ done }) {
  const [receipt, setReceipt] = useState(null);
  const own = done.result?.usage;
  useEffect(() => {
    setReceipt(null);
    if (own?.neurons !== undefined || !can("read")) return undefined;
    const controller = new AbortController();
    receiptOf(done.request, controller.signal).then(setReceipt, () => {});
    return () => controller.abort();
  }, [done.request]);
  const usage = own?.neurons === undefined ? (receipt ?? {}) : own;
  const tokens = own?.total_tokens ?? own?.input_tokens;
  const rows = [
    ["Took", ms(done.ms)],
    ["Tokens", tokens !== undefined && count(tokens)],
    ["Neurons", usage.neurons !== undefined && neurons(usage.neurons)],
    ["Cost", usage.cost && money(usage.cost)],
  ].filter(([, value]) => value);
  return html`<dl class="stats">${rows.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
    <div><dt class="sr-only">Request</dt><dd><a href=${link("requests", done.request)}>Request</a></dd></div></dl>`;
}
