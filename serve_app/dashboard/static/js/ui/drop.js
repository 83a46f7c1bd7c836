// A place for files: dropped, or chosen.
import { classes, html, newId, useState } from "../core/lib.js";
import { Icon } from "./icons.js";

/** @param {{label: string, hint?: string, accept?: string, multiple?: boolean, onFiles: (files: File[]) => any}} props */
export function Drop({ label, hint, accept, multiple, onFiles }) {
  const [over, setOver] = useState(false);
  const [id] = useState(() => newId("drop"));
  const take = (list) => { if (list.length) onFiles([...list]); };
  return html`<div class=${classes("drop", over && "drop-over")}
      onDragOver=${(event) => { event.preventDefault(); setOver(true); }} onDragLeave=${() => setOver(false)}
      onDrop=${(event) => { event.preventDefault(); setOver(false); take(event.dataTransfer.files); }}>
    <${Icon} name="upload" size="22" />
    <label for=${id}><strong>${label}</strong></label>
    ${hint && html`<span class="hint">${hint}</span>`}
    <input id=${id} type="file" accept=${accept} multiple=${multiple} onChange=${(event) => { take(event.currentTarget.files); event.currentTarget.value = ""; }} />
  </div>`;
}
