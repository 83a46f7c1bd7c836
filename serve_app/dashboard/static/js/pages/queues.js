// Queues: made, changed and ended; their messages; and what takes them.
import { get, ofAccount, patch, post, remove } from "../core/api.js";
import { ago, bytes, count, dateTime, shortModel } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { link } from "../core/router.js";
import { can } from "../core/session.js";
import { Consumer } from "../queues/consumer.js";
import { Messages } from "../queues/messages.js";
import { QueueDialog } from "../queues/queue_dialog.js";
import { Button } from "../ui/controls.js";
import { confirm } from "../ui/dialog.js";
import { Badge, Card, Empty, Figure, Loaded, PageHead } from "../ui/states.js";
import { Table } from "../ui/table.js";
import { toast } from "../ui/toast.js";

export const path = (queue, rest = "") => ofAccount(`/queues/${encodeURIComponent(queue)}${rest}`);

export default function Queues({ place }) {
  const list = useResource(async (signal) => {
    const queues = await get(ofAccount("/queues"), {}, { signal });
    const backlogs = await Promise.all(queues.map((one) => get(path(one.queue_id, "/metrics"), {}, { signal })));
    return queues.map((one, at) => ({ ...one, backlog: backlogs[at] }));
  }, [], { every: 3 });
  if (place.rest) {
    return html`<${Loaded} of=${list} tall>${(rows) => {
      const queue = rows.find((one) => one.queue_id === place.rest);
      return queue ? html`<${One} key=${queue.queue_id} queue=${queue} all=${rows} reload=${list.reload} />`
        : html`<${Empty} icon="queues" title="No such queue" action=${html`<${Button} href=${link("queues")}>All queues<//>`}>It may have been deleted.<//>`;
    }}<//>`;
  }
  return html`<${List} list=${list} />`;
}

function List({ list }) {
  const [adding, setAdding] = useState(false);
  const columns = [
    { key: "queue_name", label: "Queue", by: (one) => one.queue_name, cell: (one) => html`<a href=${link("queues", one.queue_id)}><strong class="wrap">${one.queue_name}</strong></a>${one.settings.delivery_paused && html` <${Badge} kind="warn">paused<//>`}` },
    { key: "consumer", label: "Taken by", cell: (one) => taker(one) },
    { key: "count", label: "Messages", right: true, by: (one) => one.backlog.backlog_count, cell: (one) => count(one.backlog.backlog_count) },
    { key: "bytes", label: "Size", right: true, by: (one) => one.backlog.backlog_bytes, cell: (one) => bytes(one.backlog.backlog_bytes) },
    { key: "oldest", label: "Oldest", by: (one) => one.backlog.oldest_message_timestamp_ms, cell: (one) => oldest(one.backlog) },
    { key: "created_on", label: "Made", by: (one) => one.created_on, cell: (one) => html`<span class="nowrap">${dateTime(one.created_on)}</span>` },
  ];
  return html`
    <${PageHead} title="Queues" action=${can("inference") && html`<${Button} main icon="plus" onClick=${() => setAdding(true)}>New queue<//>`}>
      Messages that wait until somebody pulls them, or until a model has run them.<//>
    <${Card} bare><${Loaded} of=${list}>${(rows) => (rows.length ? html`<${Table} label="Queues" columns=${columns} rows=${rows} id=${(one) => one.queue_id} sort="queue_name" />`
      : html`<${Empty} icon="queues" title="No queues yet">Make one, push messages, and bind it to a model or pull them yourself.<//>`)}<//><//>
    ${adding && html`<${QueueDialog} onClose=${() => setAdding(false)} onDone=${async () => { setAdding(false); await list.reload(); }} />`}`;
}

const taker = (queue) => {
  const [consumer] = queue.consumers;
  if (!consumer) return html`<span class="muted">nobody yet; pull it</span>`;
  return consumer.model ? html`<a class="wrap" href=${link("models", consumer.model)}>${shortModel(consumer.model)}</a>` : "who pulls";
};

const oldest = (backlog) => (backlog.oldest_message_timestamp_ms ? ago(backlog.oldest_message_timestamp_ms / 1000) : "–");

function One({ queue, all, reload }) {
  const [editing, setEditing] = useState(false);
  const able = can("inference");
  const pause = async () => {
    await patch(path(queue.queue_id), { settings: { delivery_paused: !queue.settings.delivery_paused } });
    toast(queue.settings.delivery_paused ? "Messages are delivered again" : "Delivery is paused");
    await reload();
  };
  const purge = async () => {
    if (!(await confirm({ title: "Drop all messages?", text: `${count(queue.backlog.backlog_count)} messages are deleted, those under a lease too.`, action: "Drop all" }))) return;
    await post(path(queue.queue_id, "/purge"), { delete_messages_permanently: true });
    toast("All messages are dropped");
    await reload();
  };
  const end = async () => {
    if (!(await confirm({ title: `Delete ${queue.queue_name}?`, text: "The queue goes with all its messages.", action: "Delete queue" }))) return;
    await remove(path(queue.queue_id));
    toast("The queue is deleted");
    location.hash = link("queues");
  };
  return html`
    <${PageHead} title=${queue.queue_name} back=${{ href: link("queues"), label: "Queues" }} action=${able && html`
      <${Button} onClick=${() => setEditing(true)} icon="edit">Settings<//>
      <${Button} onClick=${pause}>${queue.settings.delivery_paused ? "Resume" : "Pause"}<//>
      <${Button} bad onClick=${purge} disabled=${!queue.backlog.backlog_count}>Drop all<//>
      <${Button} bad icon="trash" label="Delete queue" onClick=${end} />`}>
      <span class="mono wrap">${queue.queue_id}</span>${queue.settings.delivery_paused && html` <${Badge} kind="warn">paused<//>`}<//>
    <div class="grid-figures">
      <${Figure} label="Messages" value=${count(queue.backlog.backlog_count)} note="not acknowledged yet" />
      <${Figure} label="Size" value=${bytes(queue.backlog.backlog_bytes)} />
      <${Figure} label="Oldest" value=${oldest(queue.backlog)} />
      <${Figure} label="Kept for" value=${count(queue.settings.message_retention_period / 3600)} unit="h" note=${`delivered after ${queue.settings.delivery_delay} s`} />
    </div>
    <${Consumer} queue=${queue} all=${all} reload=${reload} />
    <${Messages} queue=${queue} reload=${reload} />
    ${editing && html`<${QueueDialog} queue=${queue} onClose=${() => setEditing(false)} onDone=${async () => { setEditing(false); await reload(); }} />`}`;
}
