// The code of a model's page.
import { html, useState } from "../core/lib.js";
import { session } from "../core/session.js";
import { Code } from "../ui/code.js";
import { Tabs } from "../ui/controls.js";
import { samples } from "./samples.js";

export function Samples({ model }) {
  const list = samples(model, { origin: location.origin, account: session().account });
  const [name, setName] = useState(list[0].name);
  const chosen = list.find((one) => one.name === name);
  return html`<div class="stack">
    <${Tabs} label="Language" value=${name} options=${list.map((one) => ({ value: one.name, label: one.title }))} onInput=${setName} />
    ${name === "binding" ? html`<p class="hint">Runs where Ray can be reached; needs no key.</p>` : html`<p class="hint">Before it runs: <code>export KEY=…</code> with a key of this account that has the scope inference.</p>`}
    <${Code} text=${chosen.text} label=${chosen.title} /></div>`;
}
