// Batches of every API: sent, watched, cancelled, run again, and their results.
import { ai, download, get, post, remove } from "../core/api.js";
import { count, dateTime, money, neurons, rate, shortModel, span } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { can } from "../core/session.js";
import { NewBatch } from "../batches/new_batch.js";
import { Results } from "../batches/results.js";
import { Button } from "../ui/controls.js";
import { confirm, Dialog } from "../ui/dialog.js";
import { Badge, Card, Empty, Loaded, Meter, PageHead } from "../ui/states.js";
import { Table } from "../ui/table.js";
import { toast } from "../ui/toast.js";

const KINDS = { completed: "good", failed: "bad", cancelled: "", cancelling: "warn", expired: "warn", running: "accent", finalizing: "accent", validating: "accent", queued: "accent" };
const over = (batch) => Boolean(batch.ended_at);

export default function Batches() {
  const list = useResource((signal) => get(ai("/batches"), { limit: 100 }, { signal }), [], { every: 2 });
  const [adding, setAdding] = useState(false);
  const [shown, setShown] = useState(null);
  const able = can("inference");
  const path = (batch, rest = "") => ai(`/batches/${batch.id}${rest}`);
  const act = (work, text) => async () => {
    await work();
    toast(text);
    await list.reload();
  };
  const end = async (batch) => {
    const question = over(batch)
      ? { title: "Delete this batch?", text: "Its input and its results are deleted. What it cost stays in the ledger.", action: "Delete batch" }
      : { title: "Cancel this batch?", text: "What is done is kept; the rest is not run.", action: "Cancel batch" };
    if (!(await confirm(question))) return;
    await (over(batch) ? remove(path(batch)) : post(path(batch, "/cancel"), {}));
    toast(over(batch) ? "Deleted" : "Cancelling");
    await list.reload();
  };
  const columns = [
    { key: "status", label: "Status", by: (one) => one.status, cell: (one) => html`<${Badge} dot kind=${KINDS[one.status] ?? ""}>${one.status.replace("_", " ")}<//>` },
    { key: "id", label: "Batch", cell: (one) => html`<div><strong class="wrap">${one.model ? shortModel(one.model) : "several models"}</strong><br /><span class="mono muted small">${one.id.slice(0, 12)}…</span></div>` },
    { key: "progress", label: "Progress", by: (one) => one.progress.done / (one.requests.total || 1), cell: (one) => html`<${Progress} batch=${one} />` },
    { key: "neurons", label: "Neurons", right: true, by: (one) => one.neurons, cell: (one) => neurons(one.neurons) },
    { key: "cost", label: "Money", right: true, by: (one) => Number(one.cost?.amount ?? 0), cell: (one) => money(one.cost) },
    { key: "created_at", label: "Sent", by: (one) => one.created_at, cell: (one) => html`<span class="nowrap">${dateTime(one.created_at)}</span>` },
    { key: "actions", label: "", cell: (one) => html`
      <${Button} small icon="search" label="Show results" onClick=${() => setShown(one)} />
      <${Button} small icon="download" label="Save results" disabled=${!one.progress.done} onClick=${() => download(path(one, "/results"), {}, `batch-${one.id}.jsonl`)} />
      ${able && over(one) && one.requests.succeeded < one.requests.total && html`<${Button} small icon="refresh" label="Run again what did not succeed" onClick=${act(() => post(path(one, "/retry"), {}), "A new batch is queued")} />`}
      ${able && html`<${Button} small bad icon=${over(one) ? "trash" : "stop"} label=${over(one) ? "Delete" : "Cancel"} onClick=${() => end(one)} />`}` },
  ];
  return html`
    <${PageHead} title="Batches" action=${able && html`<${Button} main icon="plus" onClick=${() => setAdding(true)}>New batch<//>`}>
      Requests that can wait: answered within a day, after real-time ones, and cheaper where the price list says so.<//>
    <${Card} bare><${Loaded} of=${list}>${(rows) => (rows.length
      ? html`<${Table} label="Batches" columns=${columns} rows=${rows} sort="-created_at" />`
      : html`<${Empty} icon="batches" title="No batches yet">Send a file with one request on each line, or use one of the three APIs.<//>`)}<//><//>
    ${adding && html`<${NewBatch} onClose=${() => setAdding(false)} onDone=${() => { setAdding(false); list.reload(); }} />`}
    ${shown && html`<${Dialog} wide title="Results" onClose=${() => setShown(null)}><${Results} batch=${list.data.find((one) => one.id === shown.id) ?? shown} /><//>`}`;
}

function Progress({ batch }) {
  const { total, succeeded, failed, cancelled, expired } = batch.requests;
  // What was never run is none of what is done.
  const run = batch.progress.done - (cancelled ?? 0) - (expired ?? 0);
  const { seconds_left: left, requests_per_second: pace } = batch.progress;
  return html`<div class="stack-s" style=${{ minWidth: "9rem" }}><${Meter} plain share=${total ? run / total : 0} label="Share done" />
    <span class="small muted num">${count(run)} of ${count(total)}${failed ? html`, <span class="bad">${failed} failed</span>` : ""}${!over(batch) && left ? `, ${span(left)} left` : ""}${!over(batch) && pace ? `, ${rate(pace)}/s` : ""}</span></div>`;
}
