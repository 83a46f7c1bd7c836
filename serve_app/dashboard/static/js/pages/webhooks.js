// Webhooks, which are told of events, with what they were sent; and events that come into queues.
import { ai, get, ofAccount, patch, post, remove } from "../core/api.js";
import { ago, count, dateTime, shortModel } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { link } from "../core/router.js";
import { Button } from "../ui/controls.js";
import { confirm } from "../ui/dialog.js";
import { Badge, Card, Empty, Loaded, PageHead } from "../ui/states.js";
import { Table } from "../ui/table.js";
import { toast } from "../ui/toast.js";
import { EventsDialog } from "../webhooks/events_dialog.js";

const KINDS = { delivered: "good", waiting: "accent", dead: "bad" };

export default function Webhooks({ place }) {
  const lists = useResource(async (signal) => {
    const [hooks, events, queues] = await Promise.all([
      get(ai("/webhooks"), { per_page: 1000 }, { signal }),
      get(ofAccount("/event_subscriptions/subscriptions"), { per_page: 1000 }, { signal }),
      get(ofAccount("/queues"), {}, { signal }).catch(() => []),
    ]);
    return { hooks, events, queues };
  }, [], { every: 10 });
  return html`<${Loaded} of=${lists} tall>${(told) => {
    const hook = place.rest && told.hooks.find((one) => one.id === place.rest);
    if (place.rest && !hook) return html`<${Empty} icon="webhooks" title="No such webhook" action=${html`<${Button} href=${link("webhooks")}>All webhooks<//>`}>It may have been ended.<//>`;
    return hook ? html`<${One} key=${hook.id} hook=${hook} reload=${lists.reload} />` : html`<${Lists} ...${told} reload=${lists.reload} />`;
  }}<//>`;
}

function Lists({ hooks, events, queues, reload }) {
  const [adding, setAdding] = useState("");
  const toggle = (path, one) => async () => {
    await patch(path, { enabled: !one.enabled });
    toast(one.enabled ? "Switched off" : "Switched on");
    await reload();
  };
  const end = (path, name) => async () => {
    if (!(await confirm({ title: `End ${name}?`, text: "What was not sent yet is not sent any more.", action: "End it" }))) return;
    await remove(path);
    toast("Ended");
    await reload();
  };
  const columns = (first, path, name) => [
    first,
    { key: "events", label: "Events", cell: (one) => html`<span class="row">${one.events.map((kind) => html`<${Badge} key=${kind}>${kind}<//>`)}</span>` },
    { key: "model", label: "Model", cell: (one) => { const model = one.model ?? one.source?.model_name; return model ? shortModel(model) : "all"; } },
    { key: "enabled", label: "State", by: (one) => (one.enabled ? 0 : 1), cell: (one) => html`<${Badge} dot kind=${one.enabled ? "good" : ""}>${one.enabled ? "on" : "off"}<//>` },
    { key: "created_at", label: "Made", by: (one) => one.created_at, cell: (one) => html`<span class="nowrap">${dateTime(one.created_at)}</span>` },
    { key: "actions", label: "", cell: (one) => html`<${Button} small onClick=${toggle(path(one), one)}>${one.enabled ? "Switch off" : "Switch on"}<//>
      <${Button} small bad icon="trash" label=${`End ${name(one)}`} onClick=${end(path(one), name(one))} />` },
  ];
  const queueOf = (one) => queues.find((queue) => queue.queue_id === one.destination.queue_id)?.queue_name ?? one.destination.queue_id;
  return html`
    <${PageHead} title="Webhooks" action=${html`<${Button} icon="queues" disabled=${!queues.length} onClick=${() => setAdding("queue")}>Into a queue<//><${Button} main icon="plus" onClick=${() => setAdding("url")}>New webhook<//>`}>
      Who is told when a batch ends, a budget is reached, or something else happens.<//>
    <${Card} title="URLs" bare><div class="table-top">${hooks.length
      ? html`<${Table} label="Webhooks" rows=${hooks} columns=${columns({ key: "url", label: "URL", by: (one) => one.url, cell: (one) => html`<a href=${link("webhooks", one.id)}><strong class="wrap">${one.name || one.url}</strong></a>${one.name && html`<br /><span class="small muted wrap">${one.url}</span>`}` }, (one) => ai(`/webhooks/${one.id}`), (one) => one.name || one.url)} />`
      : html`<${Empty} icon="webhooks" title="No webhooks yet">A URL of yours is called with a signed message, and again until it answers.<//>`}</div><//>
    ${events.length > 0 && html`<${Card} title="Into queues" note="Events that become messages of a queue" bare><div class="table-top"><${Table} label="Events into queues" rows=${events}
      columns=${columns({ key: "queue", label: "Queue", by: queueOf, cell: (one) => html`<a href=${link("queues", one.destination.queue_id)}><strong class="wrap">${queueOf(one)}</strong></a>` }, (one) => ofAccount(`/event_subscriptions/subscriptions/${one.id}`), queueOf)} /></div><//>`}
    ${adding && html`<${EventsDialog} queues=${adding === "queue" ? queues : null} onClose=${() => setAdding("")} reload=${reload} />`}`;
}

function One({ hook, reload }) {
  const sent = useResource((signal) => get(ai(`/webhooks/${hook.id}/deliveries`), { limit: 100 }, { signal }), [hook.id], { every: 5 });
  const again = async (which, text) => {
    const told = await post(ai(`/webhooks/${hook.id}/replay`), which);
    toast(told.replayed ? text(told.replayed) : "There was nothing to send again");
    await Promise.all([sent.reload(), reload()]);
  };
  const columns = [
    { key: "at", label: "When", by: (one) => one.at, cell: (one) => html`<span class="nowrap">${dateTime(one.at)}</span>` },
    { key: "event", label: "Event", by: (one) => one.event, cell: (one) => one.event },
    { key: "status", label: "Status", by: (one) => one.status, cell: (one) => html`<${Badge} dot kind=${KINDS[one.status] ?? "warn"}>${one.status.replaceAll("_", " ")}<//>` },
    { key: "attempts", label: "Tries", right: true, by: (one) => one.attempts, cell: (one) => count(one.attempts) },
    { key: "next", label: "Next try", cell: (one) => (one.next_attempt_at ? ago(one.next_attempt_at) : "–") },
    { key: "error", label: "Why not", cell: (one) => html`<span class="small wrap">${one.error ?? ""}</span>` },
    { key: "actions", label: "", cell: (one) => html`<${Button} small icon="refresh" label=${`Send ${one.event} again`} onClick=${() => again({ delivery: one.id, all: true }, () => "It is sent again")} />` },
  ];
  return html`
    <${PageHead} title=${hook.name || "Webhook"} back=${{ href: link("webhooks"), label: "Webhooks" }}
      action=${html`<${Button} icon="refresh" onClick=${() => again({}, (many) => `${many} are sent again`)}>Send again what was not taken<//>`}><span class="mono wrap">${hook.url}</span><//>
    <${Card} title="Sent" note="The newest first" bare><div class="table-top"><${Loaded} of=${sent}>${(rows) => (rows.length ? html`<${Table} label="Deliveries" rows=${rows} columns=${columns} />`
      : html`<${Empty} icon="webhooks" title="Nothing was sent yet">Events of the kinds that this webhook wants appear here.<//>`)}<//></div><//>`;
}
