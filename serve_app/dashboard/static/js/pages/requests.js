// Requests: the last ones, with filters; and the path of one as a waterfall.
import { ApiError, ai, get, post } from "../core/api.js";
import { models } from "../core/catalog.js";
import { count, dateTime, money, ms, neurons, shortModel, time } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { facts } from "../core/path.js";
import { useResource } from "../core/resource.js";
import { link, setQuery } from "../core/router.js";
import { can, session } from "../core/session.js";
import { Kept, Prompt } from "../requests/prompt_log.js";
import { CopyButton } from "../ui/code.js";
import { Button, Select, TextField } from "../ui/controls.js";
import { confirm } from "../ui/dialog.js";
import { Badge, Card, Empty, Failed, Figure, Loaded, PageHead } from "../ui/states.js";
import { Table } from "../ui/table.js";
import { Waterfall } from "../ui/waterfall.js";

const KINDS = { done: "good", running: "accent", refused: "warn", failed: "bad", left: "" };
export const Status = ({ status }) => html`<${Badge} dot kind=${KINDS[status] ?? ""}>${status}<//>`;

export default function Requests({ place }) {
  return place.rest ? html`<${One} key=${place.rest} id=${place.rest} />` : html`<${List} query=${place.query} />`;
}

function List({ query }) {
  const operator = session().operator;
  const catalog = useResource((signal) => models(signal), []);
  const accounts = useResource((signal) => get("/client/v4/accounts", { per_page: 1000 }, { signal }), [], { skip: !operator });
  const list = useResource((signal) => get("/v1/requests", { limit: 100, model: query.model, status: query.status, account: query.account, min_ms: query.min_ms }, { signal, whole: true }), [JSON.stringify(query)], { every: 3 });
  const [id, setId] = useState("");
  const filter = (name) => (value) => setQuery({ [name]: value });
  const columns = [
    { key: "time", label: "When", by: (one) => one.time, cell: (one) => html`<span class="nowrap num" title=${dateTime(one.time)}>${time(one.time)}</span>` },
    { key: "id", label: "Request", cell: (one) => html`<a class="mono" href=${link("requests", one.id)}>${one.id.slice(0, 12)}…</a>` },
    { key: "status", label: "Status", by: (one) => one.status, cell: (one) => html`<${Status} status=${one.status} />` },
    { key: "model", label: "Model", by: (one) => one.model, cell: (one) => html`<span class="wrap table-name">${shortModel(one.model)}</span>` },
    ...(operator && accounts.data?.length > 1 ? [{ key: "account", label: "Account", by: (one) => one.account ?? "", cell: (one) => html`<span class="wrap">${one.account ?? "–"}</span>` }] : []),
    { key: "ttft", label: "First token", right: true, by: (one) => one.ttft_ms ?? 0, cell: (one) => ms(one.ttft_ms) },
    { key: "total", label: "Total", right: true, by: (one) => one.total_ms ?? 0, cell: (one) => ms(one.total_ms) },
    { key: "prompt", label: "Prompt", right: true, by: (one) => one.prompt_tokens ?? 0, cell: (one) => count(one.prompt_tokens) },
    { key: "cached", label: "Cached", right: true, by: (one) => one.cached_tokens ?? 0, cell: (one) => count(one.cached_tokens) },
    { key: "answer", label: "Answer", right: true, by: (one) => one.completion_tokens ?? 0, cell: (one) => count(one.completion_tokens) },
    { key: "neurons", label: "Neurons", right: true, by: (one) => Number(one.neurons ?? 0), cell: (one) => neurons(one.neurons) },
  ];
  return html`
    <${PageHead} title="Requests" action=${html`<${Kept} />`}>The last ones, with where their time went.<//>
    <form class="filters" onSubmit=${(event) => { event.preventDefault(); if (id.trim()) location.hash = link("requests", id.trim()); }}>
      <${Select} label="Model" value=${query.model ?? ""} onInput=${filter("model")} options=${[{ value: "", label: "All models" }, ...(catalog.data ?? []).map((one) => ({ value: one.id, label: shortModel(one.id) }))]} />
      <${Select} label="Status" value=${query.status ?? ""} onInput=${filter("status")} options=${[{ value: "", label: "Any" }, ...Object.keys(KINDS)]} />
      <${Select} label="Took" value=${query.min_ms ?? ""} onInput=${filter("min_ms")} options=${[{ value: "", label: "Any time" }, { value: "100", label: "0.1 s and more" }, { value: "1000", label: "1 s and more" }, { value: "10000", label: "10 s and more" }]} />
      ${operator && accounts.data?.length > 1 && html`<${Select} label="Account" value=${query.account ?? ""} onInput=${filter("account")} options=${[{ value: "", label: "All accounts" }, ...accounts.data.map((one) => one.id)]} />`}
      <${TextField} label="Find by id" value=${id} onInput=${setId} placeholder="cf-ray of an answer" />
    </form>
    <${Card} bare><${Loaded} of=${list} tall>${({ result: rows }) => (rows.length
      ? html`<${Table} label="Requests" columns=${columns} rows=${rows} sort="-time" />`
      : html`<${Empty} icon="requests" title="No requests here" action=${can("inference") && html`<${Button} href=${link("playground")}>Send one<//>`}>Requests that fit the filters appear within a second of their end.<//>`)}<//><//>`;
}

function One({ id }) {
  const path = useResource((signal) => get(`/v1/requests/${encodeURIComponent(id)}`, {}, { signal }), [id], { every: 2 });
  // The store has it a moment after the end.
  const [charged, setCharged] = useState(false);
  const receipt = useResource((signal) => get(ai(`/usage/${encodeURIComponent(id)}`), {}, { signal }).then((one) => { setCharged(true); return one; })
    .catch((error) => (error instanceof ApiError && error.status === 404 ? null : Promise.reject(error))), [id, path.data?.status], { every: charged ? 0 : 2 });
  const end = async () => {
    if (!(await confirm({ title: "End this request?", text: "What it has written so far is charged.", action: "End request" }))) return;
    await post(`/v1/requests/${encodeURIComponent(id)}/cancel`, {});
    await path.reload();
  };
  const told = path.data;
  return html`
    <${PageHead} title="Request" back=${{ href: link("requests"), label: "Requests" }}
      action=${told?.status === "running" && can("inference") && html`<${Button} bad icon="stop" onClick=${end}>End it<//>`}>
      <span class="row"><span class="mono wrap">${id}</span><${CopyButton} text=${id} label="Copy the id" quiet /></span><//>
    ${path.error && !told ? html`<${Failed} error=${path.error.status === 404 ? { message: "No request of this account has this id, or it is too long ago. The last 20,000 are kept.", status: 404 } : path.error} reload=${path.reload} />`
      : html`<${Loaded} of=${path} tall>${(shown) => html`<${Detail} path=${shown} receipt=${receipt.data} />`}<//>`}
    <${Prompt} id=${id} />`;
}

function Detail({ path, receipt }) {
  const figures = facts(path);
  return html`
    <div class="grid-figures">
      <${Figure} label="Status" value=${html`<${Status} status=${path.status} />`} note=${`${shortModel(path.model)}, ${dateTime(path.created)}`} />
      <${Figure} label="Time to first token" value=${ms(figures.ttft_ms)} note=${`${ms(figures.total_ms)} in all`} />
      <${Figure} label="Prompt" value=${count(figures.prompt_tokens)} unit="tokens" note=${`${count(figures.cached_tokens)} of them cached`} />
      <${Figure} label="Answer" value=${count(figures.completion_tokens)} unit="tokens" note=${figures.drafted ? `${count(figures.accepted)} of ${count(figures.drafted)} drafts accepted` : ""} />
      ${receipt && html`<${Figure} label="Neurons" value=${neurons(receipt.neurons)} note=${money(receipt.cost)} />`}
    </div>
    <${Card} title="Where the time went"><${Waterfall} path=${path} /><//>
    <${Card} title="Events" bare><div class="table-top"><${Table} label="Events" rows=${path.events.map((one, at) => ({ ...one, id: at }))} columns=${[
      { key: "ms", label: "After", right: true, cell: (one) => ms(one.ms) },
      { key: "event", label: "Event", cell: (one) => one.event },
      { key: "about", label: "Details", cell: (one) => html`<span class="small wrap">${Object.entries(one).filter(([name]) => !["ms", "event", "id"].includes(name)).map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(" · ")}</span>` },
    ]} /></div><//>`;
}
