// Dialogs: the browser's own, which keeps the focus inside and closes on Escape.
import { html, newId, render, useEffect, useRef, useState } from "../core/lib.js";
import { Button } from "./controls.js";

/** @param {{title: string, onClose: () => void, wide?: boolean, children?: any, foot?: any}} props */
export function Dialog({ title, onClose, wide, children, foot }) {
  const box = useRef(null);
  const [id] = useState(() => newId("dialog"));
  useEffect(() => {
    const before = document.activeElement;
    box.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${box} class=${`dialog ${wide ? "dialog-wide" : ""}`} aria-labelledby=${id} onCancel=${(event) => { event.preventDefault(); onClose(); }}>
    <div class="dialog-head"><h2 id=${id}>${title}</h2><${Button} quiet small icon="close" label="Close" onClick=${onClose} /></div>
    <div class="dialog-body">${children}</div>
    ${foot && html`<div class="dialog-foot">${foot}</div>`}
  </dialog>`;
}

/**
 * Asks before something is destroyed. Resolves to whether it was agreed to.
 * @param {{title: string, text: any, action: string}} question
 * @returns {Promise<boolean>}
 */
export function confirm({ title, text, action }) {
  const place = document.createElement("div");
  document.body.append(place);
  return new Promise((resolve) => {
    const end = (answer) => {
      render(null, place);
      place.remove();
      resolve(answer);
    };
    render(html`<${Dialog} title=${title} onClose=${() => end(false)}
      foot=${html`<${Button} onClick=${() => end(false)}>Cancel<//><${Button} bad onClick=${() => end(true)}>${action}<//>`}>
      <p class="wrap">${text}</p><//>`, place);
  });
}
