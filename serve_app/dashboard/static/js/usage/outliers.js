// What stands out: days of the last week on which a model or a key used more than usual, as the API tells.
import { ai, get } from "../core/api.js";
import { date, neurons, rate, shortModel } from "../core/format.js";
import { html } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Badge, Card, Empty, Loaded } from "../ui/states.js";

const MOST = 8;

export function Outliers({ all }) {
  const found = useResource((signal) => get(ai("/usage/outliers"), all ? { account: "all" } : {}, { signal }), [all]);
  return html`<${Card} title="What stands out" note="Days of the last week above the 95th percentile of the 30 days before, in neurons"><${Loaded} of=${found}>${(list) => (list.length
    ? html`<ul class="stack-s">${list.slice(0, MOST).map((one) => html`<li class="between" key=${`${one.account} ${one.group} ${one.name} ${one.time}`}>
        <span class="wrap"><${Badge}>${one.group}<//> <strong>${one.group === "model" ? shortModel(one.name) : one.name}</strong> <span class="muted">${all ? `of ${one.account} ` : ""}on ${date(one.time)}</span></span>
        <span class="num">${neurons(one.neurons)} neurons <${Badge} kind="warn">${rate(one.ratio)} × usual<//></span></li>`)}</ul>`
    : html`<${Empty} icon="check" title="Nothing unusual">No model or key used more than it does on 95 % of its days.<//>`)}<//><//>`;
}
