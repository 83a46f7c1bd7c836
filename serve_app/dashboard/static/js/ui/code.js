// Text to copy.
import { html, useState } from "../core/lib.js";
import { Button } from "./controls.js";
import { toast } from "./toast.js";

/** Copies text; where the clipboard is not to be had (no secure context), by a selection. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export function CopyButton({ text, label = "Copy", small = true, quiet, children }) {
  const [done, setDone] = useState(false);
  const press = async () => {
    await copy(typeof text === "function" ? text() : text);
    setDone(true);
    toast("Copied");
    setTimeout(() => setDone(false), 1500);
  };
  return html`<${Button} small=${small} quiet=${quiet} icon=${done ? "check" : "copy"} label=${children ? undefined : label} onClick=${press}>${children}<//>`;
}

/** A block of code with a button that copies it. */
export const Code = ({ text, label = "Code" }) => html`<div class="code"><pre tabindex="0" role="region" aria-label=${label}><code>${text}</code></pre>
  <div class="copy"><${CopyButton} text=${text} label=${`Copy ${label.toLowerCase()}`} /></div></div>`;
