// The store as a figure: whether it can be reached, and what waits to be written to it.
import { bytes, count } from "../core/format.js";
import { html } from "../core/lib.js";
import { Badge, Figure } from "../ui/states.js";

export function Store({ gateway }) {
  const store = gateway?.store;
  if (!store) return null;
  return html`<${Figure} label="Store" value=${html`<${Badge} dot kind=${store.status === "ready" ? "good" : "bad"}>${store.status}<//>`}
    note=${`${count(store.waiting)} writes wait, journal ${bytes(store.journal_bytes)}`} />`;
}
