// The code of a model's page: first the language, then what calls the server.
import { kind, schema, special } from "../core/catalog.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { session } from "../core/session.js";
import { Code } from "../ui/code.js";
import { Segments, Tabs } from "../ui/controls.js";
import { Loaded } from "../ui/states.js";
import { LANGUAGES, samples } from "./samples.js";

export function Samples({ model }) {
  // What other tasks are asked stands in their schemas.
  const told = useResource(async (signal) => (special(kind(model)) ? null : (await schema(model.id, signal)).input), [model.id]);
  return html`<${Loaded} of=${told} tall>${(input) => html`<${List} model=${model} input=${input} />`}<//>`;
}

function List({ model, input }) {
  const list = samples(model, { origin: location.origin, account: session().account }, input ?? undefined);
  const [language, setLanguage] = useState(LANGUAGES[0]);
  const [client, setClient] = useState("");
  const inside = list.filter((one) => one.language === language);
  // The same client in another language, where there is one.
  const chosen = inside.find((one) => one.client === client) ?? inside[0];
  return html`<div class="stack">
    <${Tabs} label="Language" value=${language} options=${LANGUAGES.map((one) => ({ value: one, label: one }))} onInput=${setLanguage} />
    ${inside.length > 1 && html`<${Segments} label="Client" value=${chosen.client} onInput=${setClient} options=${inside.map((one) => ({ value: one.client, label: one.client }))} />`}
    ${chosen.client === "On the cluster" ? html`<p class="hint">Runs where Ray can be reached; needs no key.</p>`
      : html`<p class="hint">Before it runs: <code>export KEY=…</code> with a key of this account that has the scope inference${chosen.needs && html`, and <code>${chosen.needs}</code>`}.${language === "JavaScript" && html` It is a module: save it as <code>sample.mjs</code>.`}</p>`}
    <${Code} text=${chosen.text} label="Code" /></div>`;
}
