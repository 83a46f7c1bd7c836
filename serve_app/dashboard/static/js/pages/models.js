// Models: the catalogue as cards, and a page for each.
import { models } from "../core/catalog.js";
import { date } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { link } from "../core/router.js";
import { session } from "../core/session.js";
import { AddRecord } from "../models/add_record.js";
import { ModelPage } from "../models/model_page.js";
import { records, Resting } from "../models/operate.js";
import { priceLine } from "../models/price.js";
import { marks, states } from "../models/state.js";
import { Button, Select, TextField } from "../ui/controls.js";
import { Badge, Empty, Loaded, PageHead } from "../ui/states.js";

export default function Models({ place }) {
  const catalog = useResource(async (signal) => {
    const [list, state, known] = await Promise.all([models(signal), states(signal), records(signal)]);
    return { list, state, known };
  }, [], { every: 5 });
  if (place.rest) {
    return html`<${Loaded} of=${catalog} tall>${({ list, state, known }) => {
      const model = list.find((one) => one.id === place.rest);
      return model
        ? html`<${ModelPage} key=${model.id} model=${model} state=${state[model.id]} tab=${place.query.tab} record=${known.find((one) => one.model === model.id)} reload=${catalog.reload} />`
        : html`<${Empty} icon="models" title="No such model here" action=${html`<${Button} href=${link("models")}>All models<//>`}><span class="mono wrap">${place.rest}</span> is not in the catalogue of this server.<//>`;
    }}<//>`;
  }
  return html`<${Loaded} of=${catalog} tall>${(data) => html`<${Catalogue} ...${data} reload=${catalog.reload} />`}<//>`;
}

function Catalogue({ list, state, known, reload }) {
  const [adding, setAdding] = useState(false);
  const [search, setSearch] = useState("");
  const [task, setTask] = useState("");
  const tasks = [...new Set(list.map((one) => one.task))].sort();
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = list.filter((one) => (!task || one.task === task) && words.every((word) => `${one.id} ${one.description} ${one.task}`.toLowerCase().includes(word)));
  return html`
    <${PageHead} title="Models" action=${session().operator && html`<${Button} main icon="plus" onClick=${() => setAdding(true)}>Add a model<//>`}>
      What this server's catalogue holds, with prices and what each can do.<//>
    <div class="filters">
      <${TextField} label="Search" type="search" value=${search} onInput=${setSearch} placeholder="Name or description" />
      <${Select} label="Task" value=${task} onInput=${setTask} options=${[{ value: "", label: "All tasks" }, ...tasks]} />
    </div>
    ${shown.length
      ? html`<ul class="grid-cards">${shown.map((one) => html`<li class="card" key=${one.id}><${ModelCard} model=${one} state=${state[one.id]} /></li>`)}</ul>`
      : html`<${Empty} icon="search" title="No model fits">Try fewer words, or another task.<//>`}
    <${Resting} list=${known} reload=${reload} />
    ${adding && html`<${AddRecord} known=${known} onClose=${() => setAdding(false)} onDone=${async () => { setAdding(false); await reload(); }} />`}`;
}

const ModelCard = ({ model, state }) => html`<a class="card-link" href=${link("models", model.id)}>
  <div class="between"><span class="small muted">${model.task}</span><${StateBadge} state=${state} /></div>
  <h2 class="wrap">${model.id.replace(/^@(cf|hf)\//, "")}</h2>
  <p>${model.description}</p>
  ${priceLine(model) && html`<p class="small">${priceLine(model)}</p>`}
  <div class="row">${marks(model).map((one) => html`<${Badge} key=${one}>${one}<//>`)}
    ${model.properties.planned_deprecation_date && html`<${Badge} kind="warn">ends ${date(model.properties.planned_deprecation_date)}<//>`}</div>
</a>`;

export const StateBadge = ({ state }) => (state ? html`<${Badge} dot kind=${state.kind}>${state.label}<//>` : null);
