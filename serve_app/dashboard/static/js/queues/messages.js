// Messages of a queue: looked at, pushed, dropped one by one; pulled under a lease and acknowledged.
import { ofAccount, post } from "../core/api.js";
import { count, dateTime } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { can } from "../core/session.js";
import { Button, TextArea, TextField } from "../ui/controls.js";
import { Dialog } from "../ui/dialog.js";
import { Card, Empty, Loaded, Notice } from "../ui/states.js";
import { Table } from "../ui/table.js";
import { toast } from "../ui/toast.js";

const LEASE_S = 60;

/** The text of a message; JSON comes as base64 of its bytes. */
function text(message) {
  if (message.metadata["CF-Content-Type"] === "text") return message.body;
  return new TextDecoder().decode(Uint8Array.from(atob(message.body), (one) => one.charCodeAt(0)));
}

export function Messages({ queue, reload }) {
  const path = (rest) => ofAccount(`/queues/${queue.queue_id}/messages${rest}`);
  const able = can("inference");
  const waiting = useResource((signal) => (able ? post(path("/peek"), { batch_size: 20 }, { signal }) : { messages: [] }), [queue.queue_id], { every: 5 });
  const [pulled, setPulled] = useState([]);
  const [pushing, setPushing] = useState(false);
  const again = async () => { await Promise.all([waiting.reload(), reload()]); };
  const drop = async (one) => {
    await post(path("/purge"), { refs: [{ ref: one.ref }] });
    toast("The message is dropped");
    await again();
  };
  const pull = async () => {
    const told = await post(path("/pull"), { batch_size: 10, visibility_timeout_ms: LEASE_S * 1000 });
    setPulled(told.messages);
    if (!told.messages.length) toast("There is nothing to pull now");
    await again();
  };
  const settle = async (one, kind) => {
    const done = await post(path("/ack"), { [kind]: [{ lease_id: one.lease_id }] });
    const [gone] = Object.values(done.warnings ?? {});
    toast(gone ?? (kind === "acks" ? "Acknowledged" : "It comes again"), gone ? "bad" : "good");
    setPulled((old) => old.filter((other) => other.id !== one.id));
    await again();
  };
  const columns = (actions) => [
    { key: "body", label: "Message", cell: (one) => html`<span class="mono small wrap">${text(one).slice(0, 500)}</span>` },
    { key: "attempts", label: "Tries", right: true, by: (one) => one.attempts, cell: (one) => count(one.attempts) },
    { key: "timestamp_ms", label: "Sent", by: (one) => one.timestamp_ms, cell: (one) => html`<span class="nowrap">${dateTime(one.timestamp_ms / 1000)}</span>` },
    { key: "actions", label: "", cell: actions },
  ];
  return html`
    ${pulled.length > 0 && html`<${Card} title="Pulled" note=${`Yours for ${LEASE_S} seconds; what is not acknowledged comes again`} bare><div class="table-top"><${Table} label="Pulled messages" rows=${pulled} columns=${columns((one) => html`
      <${Button} small icon="check" label="Acknowledge" onClick=${() => settle(one, "acks")} /><${Button} small icon="refresh" label="Have it come again" onClick=${() => settle(one, "retries")} />`)} /></div><//>`}
    <${Card} title="Messages" note="The next ones, without a lease" bare action=${able && html`<${Button} small icon="download" disabled=${Boolean(queue.consumers[0]?.model)} onClick=${pull}>Pull<//><${Button} small icon="plus" onClick=${() => setPushing(true)}>Push<//>`}>
      <${Loaded} of=${waiting}>${({ messages }) => (messages.length
        ? html`<div class="table-top"><${Table} label="Messages" rows=${messages} columns=${columns((one) => able && html`<${Button} small bad icon="trash" label="Drop this message" onClick=${() => drop(one)} />`)} /></div>`
        : html`<${Empty} icon="queues" title="Nothing waits here">${able ? "Push a message, or have somebody push." : "Looking at messages needs a key with the scope inference."}<//>`)}<//><//>
    ${pushing && html`<${Push} path=${path("")} onClose=${() => setPushing(false)} onDone=${async () => { setPushing(false); await again(); }} />`}`;
}

function Push({ path, onClose, onDone }) {
  const [body, setBody] = useState('{"prompt": "Hello"}');
  const [delay, setDelay] = useState("0");
  const [error, setError] = useState("");
  const push = async () => {
    let told = body;
    try {
      told = JSON.parse(body);
    } catch {
      // Then it is a text.
    }
    const kind = typeof told === "string" ? "text" : "json";
    try {
      await post(path, { body: kind === "text" ? body : told, content_type: kind, delay_seconds: Number(delay) });
      toast("The message is pushed");
      await onDone();
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<${Dialog} title="Push a message" onClose=${onClose} foot=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} main disabled=${!body} onClick=${push}>Push<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    <${TextArea} label="Message" code rows="8" value=${body} onInput=${setBody} hint="JSON, or a text" />
    <${TextField} label="Delay in seconds" type="number" min="0" max="86400" value=${delay} onInput=${setDelay} /><//>`;
}
