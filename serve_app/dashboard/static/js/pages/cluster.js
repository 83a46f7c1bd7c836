// Cluster: of each model who works, what waits, where K/V came from, and why the planner did what it did.
import { get } from "../core/api.js";
import { count, ms, percent, shortModel } from "../core/format.js";
import { html } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { link } from "../core/router.js";
import { session } from "../core/session.js";
import { Nodes, Scaling } from "../cluster/scaling.js";
import { Store } from "../cluster/store.js";
import { Sources, Tiers } from "../cluster/sources.js";
import { Badge, Card, Empty, Figure, Loaded, Meter, PageHead } from "../ui/states.js";
import { Table } from "../ui/table.js";

/** The operator sees nodes and changes; others whether models are ready, and their own queues. */
async function look(signal) {
  if (!session().operator) return get("/v1/status", {}, { signal, whole: true });
  const told = await get("/v1/cluster", {}, { signal });
  return { ...told, models: Object.fromEntries(told.models.map((one) => [one.model, one])) };
}

export default function Cluster() {
  const status = useResource((signal) => look(signal), [], { every: 2 });
  return html`
    <${PageHead} title="Cluster">Workers, queues and caches as this server's gateways see them now.<//>
    <${Loaded} of=${status} tall>${(told) => html`<${Whole} told=${told} />`}<//>`;
}

function Whole({ told }) {
  const models = Object.entries(told.models ?? {});
  const workers = models.flatMap(([, one]) => one.workers ?? []);
  const waiting = models.reduce((sum, [, one]) => sum + total(one.routing?.waiting), 0);
  return html`
    <div class="grid-figures">
      <${Figure} label="Models ready" value=${`${models.filter(([, one]) => one.ready).length} of ${models.length}`} />
      <${Figure} label="Workers" value=${count(workers.length)} />
      <${Figure} label="In flight" value=${count(models.reduce((sum, [, one]) => sum + (one.inflight ?? 0), 0))} note=${`${count(waiting)} wait for a place`} />
      ${told.runners?.length > 0 && html`<${Figure} label="Batch runners" value=${count(told.runners.length)} note=${`${count(told.runners.reduce((sum, one) => sum + one.running, 0))} requests under way`} />`}
      <${Store} gateway=${told.gateway} />
    </div>
    ${models.length ? models.map(([id, one]) => html`<${Model} key=${id} id=${id} told=${one} />`) : html`<${Empty} icon="cluster" title="No models run here" />`}
    ${told.nodes && html`<${Nodes} nodes=${told.nodes} />`}
    ${told.scaling && html`<${Scaling} changes=${told.scaling} now=${told.time} />`}`;
}

const total = (waiting = {}) => Object.values(waiting).reduce((sum, one) => sum + (typeof one === "number" ? one : (one.requests ?? 0)), 0);

function Model({ id, told }) {
  const routing = told.routing;
  const detailed = (told.workers ?? []).some((one) => one.stage);
  // A model that may have none is not asked while it is idle, since asking would start one.
  const none = !session().operator ? "Its workers are shown to the operator of this server."
    : told.workers ? "No worker answers now." : "Scales to zero: workers are shown while requests run.";
  return html`<${Card} title=${html`<a href=${link("models", id)}>${shortModel(id)}</a>`} bare
    note=${routing?.plan ? `Planner: ${routing.plan.why}` : ""}
    action=${html`<span class="row"><${Badge} dot kind=${told.ready ? "good" : "warn"}>${told.ready ? "ready" : "not ready"}<//>${(told.silent ?? []).map((stage) => html`<${Badge} key=${stage} kind="warn">${stage} is being replaced<//>`)}</span>`}>
    ${detailed ? html`<div class="table-top"><${Workers} told=${told} /></div>` : html`<p class="card-body muted">${none}</p>`}
    ${routing && html`<div class="card-body grid-2">
      <${Waiting} waiting=${routing.waiting ?? {}} />
      <${Reasons} title="Why requests went where" counts=${routing.why ?? {}} empty="No request was placed yet." />
      <${Sources} counts=${routing.prompt_tokens_by_source ?? {}} />
      <${Tiers} workers=${told.workers ?? []} />
      ${Object.keys(routing.refused ?? {}).length > 0 && html`<${Reasons} title="Refused" counts=${routing.refused} />`}
    </div>`}<//>`;
}

function Workers({ told }) {
  const seen = new Map((told.routing?.workers ?? []).map((one) => [one.replica, one]));
  const rows = (told.workers ?? []).map((one, at) => ({ ...one, id: `${one.stage} ${one.pid ?? at}`, routed: seen.get(one.replica) }));
  return html`<${Table} label="Workers" rows=${rows} columns=${[
    { key: "stage", label: "Stage", by: (one) => one.stage, cell: (one) => html`<strong>${one.stage}</strong>${one.routed && one.routed.role !== one.stage ? html` <${Badge}>works as ${one.routed.role}<//>` : ""}` },
    { key: "replica", label: "Worker", cell: (one) => html`<span class="mono muted">${one.replica || one.pid || "–"}</span>` },
    { key: "running", label: "Running", right: true, by: (one) => one.running ?? 0, cell: (one) => count(one.running ?? one.queued_calls) },
    { key: "waiting", label: "Waiting", right: true, by: (one) => one.waiting ?? 0, cell: (one) => count(one.waiting ?? one.queued_sequences) },
    { key: "step", label: "Step", right: true, cell: (one) => ms(one.routed?.step_ms) },
    { key: "kv", label: "KV cache", cell: (one) => (one.total_blocks ? html`<div class="stack-s" style=${{ minWidth: "7rem" }}><${Meter} share=${one.used_blocks / one.total_blocks} label="Blocks in use" />
      <span class="small muted num">${percent(one.used_blocks / one.total_blocks)} of ${count(one.total_blocks)} blocks</span></div>` : "–") },
    { key: "drafts", label: "Drafts accepted", right: true, cell: (one) => (one.speculation?.proposed_tokens ? percent(one.speculation.acceptance_rate) : "–") },
    { key: "tokens", label: "Tokens", right: true, by: (one) => one.generated_tokens ?? one.tokens ?? 0, cell: (one) => count(one.generated_tokens ?? one.tokens) },
  ]} />`;
}

function Waiting({ waiting }) {
  const rows = Object.entries(waiting);
  return html`<section class="stack-s"><h3>Queues</h3>${rows.length
    ? html`<ul class="bars">${rows.map(([account, one]) => html`<li class="bar-row" key=${account}><span class="wrap">${account}</span><span class="num">${typeof one === "number" ? count(one) : `${count(one.requests)} requests, ${count(one.tokens)} tokens`}</span></li>`)}</ul>`
    : html`<p class="muted">Nobody waits.</p>`}</section>`;
}

export function Reasons({ title, counts, empty = "" }) {
  const rows = Object.entries(counts).sort(([, one], [, other]) => other - one);
  const most = Math.max(1, ...rows.map(([, one]) => one));
  return html`<section class="stack-s"><h3>${title}</h3>${rows.length
    ? html`<ul class="bars">${rows.map(([why, number]) => html`<li class="bar-row" key=${why}><span>${why}</span><span class="num">${count(number)}</span><${Meter} plain share=${number / most} label=${why} /></li>`)}</ul>`
    : html`<p class="muted">${empty}</p>`}</section>`;
}
