// The code of a model's page.
import { kind, schema } from "../core/catalog.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { session } from "../core/session.js";
import { Code } from "../ui/code.js";
import { Tabs } from "../ui/controls.js";
import { Loaded } from "../ui/states.js";
import { samples } from "./samples.js";

export function Samples({ model }) {
  // What other tasks are asked stands in their schemas.
  const told = useResource(async (signal) => (kind(model) === "form" ? (await schema(model.id, signal)).input : null), [model.id]);
  return html`<${Loaded} of=${told} tall>${(input) => html`<${List} model=${model} input=${input} />`}<//>`;
}

function List({ model, input }) {
  const list = samples(model, { origin: location.origin, account: session().account }, input ?? undefined);
  const [name, setName] = useState(list[0].name);
  const chosen = list.find((one) => one.name === name);
  return html`<div class="stack">
    <${Tabs} label="Language" value=${name} options=${list.map((one) => ({ value: one.name, label: one.title }))} onInput=${setName} />
    ${name === "binding" ? html`<p class="hint">Runs where Ray can be reached; needs no key.</p>` : html`<p class="hint">Before it runs: <code>export KEY=…</code> with a key of this account that has the scope inference.</p>`}
    <${Code} text=${chosen.text} label=${chosen.title} /></div>`;
}
