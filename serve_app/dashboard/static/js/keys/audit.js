// Who changed what in an account, newest first.
import { get, ofAccount } from "../core/api.js";
import { dateTime } from "../core/format.js";
import { html } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Card, Empty, Loaded } from "../ui/states.js";
import { Table } from "../ui/table.js";

const value = (one) => (one === null || one === undefined ? "–" : typeof one === "object" ? JSON.stringify(one) : String(one));

export function Audit({ account }) {
  const trail = useResource((signal) => get(ofAccount("/logs/audit", account.id), { limit: 200 }, { signal }), []);
  const columns = [
    { key: "time", label: "When", by: (one) => one.action.time, cell: (one) => html`<span class="nowrap" title=${one.action.time}>${dateTime(one.action.time)}</span>` },
    { key: "what", label: "What", cell: (one) => html`<span class="wrap">${one.action.description ?? `${one.action.type} ${one.resource.type}`}</span>` },
    { key: "who", label: "Who", cell: (one) => html`<span class="mono wrap">${one.actor.email ?? one.actor.id}</span>` },
    { key: "change", label: "Change", cell: (one) => html`<ul class="small">${Object.entries(one.resource.request ?? {}).map(([name, change]) => html`<li class="wrap" key=${name}><span class="muted">${name.replaceAll("_", " ")}:</span> ${value(change.before)} → ${value(change.after)}</li>`)}</ul>` },
  ];
  return html`<${Card} title="Audit trail" note="Entries are never deleted, and never hold a key." bare><div class="table-top"><${Loaded} of=${trail}>${(list) => (list.length
    ? html`<${Table} label="Audit trail" columns=${columns} rows=${list} />` : html`<${Empty} icon="requests" title="Nothing was changed yet" />`)}<//></div><//>`;
}
