// The page of one model: prices, limits, schema, code to paste, and for the operator its workers.
import { schema } from "../core/catalog.js";
import { date } from "../core/format.js";
import { html } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { link, setQuery } from "../core/router.js";
import { can } from "../core/session.js";
import { StateBadge } from "../pages/models.js";
import { Code, CopyButton } from "../ui/code.js";
import { Button, Tabs } from "../ui/controls.js";
import { Badge, Card, Loaded, Notice } from "../ui/states.js";
import { Actions } from "./operate.js";
import { Limits } from "./limits.js";
import { Prices } from "./price.js";
import { Samples } from "./samples_view.js";
import { marks } from "./state.js";

const TABS = [{ value: "about", label: "About" }, { value: "code", label: "Code" }, { value: "schema", label: "Schema" }];

export function ModelPage({ model, state, record, reload, tab = "about" }) {
  const ends = model.properties.planned_deprecation_date;
  return html`
    <header class="page-head"><div>
      <a class="crumb" href=${link("models")}>‹ Models</a>
      <h1>${model.id.replace(/^@(cf|hf)\//, "")}</h1><p>${model.description}</p>
      <div class="row"><${Badge}>${model.task}<//><${StateBadge} state=${state} />
        <span class="row small mono muted">${model.id}<${CopyButton} text=${model.id} label="Copy the model's id" quiet /></span></div>
    </div><div class="row">
      ${record && html`<${Actions} record=${record} reload=${reload} />`}
      ${can("inference") && html`<${Button} main icon="playground" href=${link("playground", "", { model: model.id })}>Try it<//>`}
    </div></header>
    ${ends && html`<${Notice} kind="warn" title=${`This model ends on ${date(ends)}.`}>Move to another one before.<//>`}
    <${Tabs} label="About this model" value=${tab} options=${TABS} onInput=${(value) => setQuery({ tab: value })} />
    ${tab === "code" ? html`<${Samples} model=${model} />` : tab === "schema" ? html`<${Schemas} model=${model} />` : html`<${About} model=${model} />`}`;
}

const About = ({ model }) => html`<div class="grid-2">
  <${Card} title="Prices" note="Per unit, in money and in neurons" bare><${Prices} model=${model} /><//>
  <${Card} title="Properties"><dl class="facts">
    ${Object.entries(model.properties).filter(([name]) => !["price", "interface"].includes(name)).map(([name, value]) => html`<dt key=${name}>${name.replaceAll("_", " ")}</dt><dd>${String(value)}</dd>`)}
    <dt>since</dt><dd>${date(model.created.replace(" ", "T"))}</dd>
    ${marks(model).length > 0 && html`<dt>can</dt><dd class="row">${marks(model).map((one) => html`<${Badge} key=${one}>${one}<//>`)}</dd>`}
  </dl><//></div><${Limits} model=${model} />`;

function Schemas({ model }) {
  const told = useResource((signal) => schema(model.id, signal), [model.id]);
  return html`<${Loaded} of=${told} tall>${({ input, output }) => html`<div class="grid-2">
    <${Card} title="Input"><${Code} label="Input schema" text=${JSON.stringify(input, null, 2)} /><//>
    <${Card} title="Output"><${Code} label="Output schema" text=${JSON.stringify(output, null, 2)} /><//></div>`}<//>`;
}
