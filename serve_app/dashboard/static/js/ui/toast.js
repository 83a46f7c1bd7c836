// Short messages in the corner, read aloud by screen readers.
import { html, useEffect, useState } from "../core/lib.js";
import { Icon } from "./icons.js";

let show = () => {};
let count = 0;

/** @param {string} text @param {"good"|"bad"} [kind] */
export const toast = (text, kind = "good") => show({ id: ++count, text, kind });

/** Says what an action that failed was refused with. */
export const toastError = (error) => { if (error?.name !== "AbortError") toast(error.message, "bad"); };

export function Toasts() {
  const [list, setList] = useState([]);
  useEffect(() => {
    show = (one) => {
      setList((old) => [...old.slice(-3), one]);
      setTimeout(() => setList((old) => old.filter((other) => other.id !== one.id)), one.kind === "bad" ? 12_000 : 5_000);
    };
    return () => { show = () => {}; };
  }, []);
  const close = (id) => setList((old) => old.filter((other) => other.id !== id));
  return html`<div class="toasts" role="status" aria-live="polite">
    ${list.map((one) => html`<div class=${`toast toast-${one.kind}`} key=${one.id}>
      <span class=${one.kind}><${Icon} name=${one.kind === "bad" ? "bad" : "check"} /></span>
      <span class="wrap" style=${{ flex: 1 }}>${one.text}</span>
      <button class="button button-quiet button-small button-icon" aria-label="Dismiss" onClick=${() => close(one.id)}><${Icon} name="close" size="14" /></button>
    </div>`)}
  </div>`;
}
