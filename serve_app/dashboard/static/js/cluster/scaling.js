// How the workers of models changed, and what the planner said: since the start of the gateway that answers.
import { count, dateTime, ms, percent, shortModel } from "../core/format.js";
import { html } from "../core/lib.js";
import { Chart } from "../ui/chart.js";
import { Badge, Card, Empty } from "../ui/states.js";
import { Table } from "../ui/table.js";

const sum = (workers) => Object.values(workers).reduce((all, one) => all + one, 0);

/** The number of each model's workers at every change, and now. */
export function overTime(changes, now) {
  const models = [...new Set(changes.map((one) => one.model))];
  const times = [...new Set(changes.map((one) => Math.floor(one.time)))].sort((one, other) => one - other);
  if (times.length && times.at(-1) < Math.floor(now)) times.push(Math.floor(now));
  const at = (model, time) => changes.findLast((one) => one.model === model && Math.floor(one.time) <= time);
  return { times, series: models.map((model) => ({ name: shortModel(model), values: times.map((time) => (at(model, time) ? sum(at(model, time).workers) : null)) })) };
}

export function Scaling({ changes, now }) {
  if (!changes.length) return html`<${Card} title="Workers over time"><${Empty} icon="cluster" title="No change yet">Changes are noted from the gateway's start on.<//><//>`;
  const { times, series } = overTime(changes, now);
  const rows = changes.map((one, id) => ({ ...one, id }));
  return html`<${Card} title="Workers over time" note="As the gateway that answered has seen it" bare>
    <div class="card-body"><${Chart} label="Workers" times=${times} series=${series} show=${count} height=${150} /></div>
    <div class="table-top"><${Table} label="Changes of workers" sort="-time" rows=${rows.slice(-50)} columns=${[
      { key: "time", label: "When", by: (one) => one.time, cell: (one) => html`<span class="nowrap">${dateTime(one.time)}</span>` },
      { key: "model", label: "Model", by: (one) => one.model, cell: (one) => html`<span class="wrap">${shortModel(one.model)}</span>` },
      { key: "workers", label: "Workers", cell: (one) => html`<span class="row">${Object.entries(one.workers).map(([name, number]) => html`<${Badge} key=${name}>${count(number)} ${name.replace(/^(.+)\/\1$/, "$1")}<//>`)}</span>` },
      { key: "why", label: "Planner", cell: (one) => html`<span class="wrap">${one.why ?? "–"}</span>` },
    ]} /></div><//>`;
}

export function Nodes({ nodes }) {
  if (!nodes.length) return null;
  const rows = nodes.flatMap((one) => one.workers.map((worker) => ({ ...worker, node: one.node, id: `${one.node} ${worker.replica}` })));
  return html`<${Card} title="Nodes" note=${`${count(nodes.length)} with workers that report their load`} bare><div class="table-top"><${Table} label="Nodes" rows=${rows} columns=${[
    { key: "node", label: "Node", by: (one) => one.node, cell: (one) => html`<span class="mono">${one.node.slice(0, 12)}</span>` },
    ...(rows.some((one) => one.zone) ? [{ key: "zone", label: "Zone", by: (one) => one.zone, cell: (one) => one.zone || "–" }] : []),
    { key: "model", label: "Model", by: (one) => one.model, cell: (one) => html`<span class="wrap">${shortModel(one.model)}</span>` },
    { key: "replica", label: "Worker", cell: (one) => html`<span class="mono muted">${one.replica}</span>` },
    { key: "role", label: "Role", by: (one) => one.role, cell: (one) => html`<${Badge}>${one.role}<//>` },
    { key: "queued", label: "Queued tokens", right: true, by: (one) => one.queued_tokens, cell: (one) => count(one.queued_tokens) },
    { key: "running", label: "Running", right: true, by: (one) => one.running, cell: (one) => count(one.running) },
    { key: "kv", label: "KV cache", right: true, by: (one) => one.kv_use, cell: (one) => percent(one.kv_use) },
    { key: "step", label: "Step", right: true, cell: (one) => ms(one.step_ms) },
  ]} /></div><//>`;
}
