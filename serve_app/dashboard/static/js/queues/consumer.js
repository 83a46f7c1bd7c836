// What takes a queue's messages: a model that runs them, or whoever pulls, with bounds.
import { ofAccount, post, put, remove } from "../core/api.js";
import { asOptions, models } from "../core/catalog.js";
import { count, shortModel } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { can } from "../core/session.js";
import { Button, Select, TextField } from "../ui/controls.js";
import { confirm, Dialog } from "../ui/dialog.js";
import { Card, Loaded, Notice } from "../ui/states.js";
import { toast } from "../ui/toast.js";

const KINDS = [{ value: "http_pull", label: "Whoever pulls" }, { value: "workers_ai", label: "A model" }];

export function Consumer({ queue, all, reload }) {
  const [open, setOpen] = useState(false);
  const [consumer] = queue.consumers;
  const able = can("inference");
  const path = ofAccount(`/queues/${queue.queue_id}/consumers`);
  const end = async () => {
    if (!(await confirm({ title: "Take the consumer away?", text: "Messages stay in the queue.", action: "Take away" }))) return;
    await remove(`${path}/${consumer.consumer_id}`);
    toast("The consumer is taken away");
    await reload();
  };
  return html`<${Card} title="Consumer" note=${consumer ? "" : "Nothing is bound to this queue; it can be pulled as it is"} action=${able && html`
    <${Button} small icon=${consumer ? "edit" : "plus"} onClick=${() => setOpen(true)}>${consumer ? "Change" : "Bind"}<//>
    ${consumer && html`<${Button} small bad icon="trash" label="Take the consumer away" onClick=${end} />`}`}>
    ${consumer && html`<dl class="facts">
      <dt>taken by</dt><dd>${consumer.model ? shortModel(consumer.model) : "whoever pulls"}</dd>
      ${consumer.results_queue && html`<dt>answers go to</dt><dd>${consumer.results_queue}</dd>`}
      <dt>at a time</dt><dd>${count(consumer.settings.batch_size)}</dd>
      <dt>tries</dt><dd>${count(consumer.settings.max_retries + 1)}</dd>
      <dt>then to</dt><dd>${consumer.dead_letter_queue || "nowhere: deleted"}</dd></dl>`}
    ${open && html`<${Edit} queue=${queue} consumer=${consumer} path=${path} all=${all} onClose=${() => setOpen(false)} onDone=${async () => { setOpen(false); await reload(); }} />`}<//>`;
}

function Edit({ queue, consumer, path, all, onClose, onDone }) {
  const others = all.filter((one) => one.queue_id !== queue.queue_id).map((one) => one.queue_name);
  const catalog = useResource((signal) => models(signal), []);
  const [form, setForm] = useState({
    type: consumer?.type ?? "http_pull",
    model: consumer?.model ?? "",
    results: consumer?.results_queue ?? others[0] ?? "",
    dead: consumer?.dead_letter_queue ?? "",
    batch: String(consumer?.settings.batch_size ?? 10),
    retries: String(consumer?.settings.max_retries ?? 3),
    lease: String((consumer?.settings.visibility_timeout_ms ?? 30_000) / 1000),
  });
  const [error, setError] = useState("");
  const set = (name) => (value) => setForm((old) => ({ ...old, [name]: value }));
  const save = async () => {
    const runs = form.type === "workers_ai" ? { model: form.model || catalog.data?.[0]?.id, results_queue: form.results } : {};
    const settings = { batch_size: Number(form.batch), max_retries: Number(form.retries), visibility_timeout_ms: Number(form.lease) * 1000 };
    const body = { type: form.type, ...(form.dead ? { dead_letter_queue: form.dead } : {}), settings, ...runs };
    try {
      await (consumer ? put(`${path}/${consumer.consumer_id}`, body) : post(path, body));
      toast("The consumer is bound");
      await onDone();
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<${Dialog} title="Consumer" onClose=${onClose} foot=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} main onClick=${save}>Save<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    <${Select} label="Messages are taken by" value=${form.type} options=${KINDS} onInput=${set("type")} />
    ${form.type === "workers_ai" && html`<${Loaded} of=${catalog}>${(list) => html`<${Select} label="Model" value=${form.model || list[0]?.id} options=${asOptions(list)} onInput=${set("model")} />`}<//>
      ${others.length ? html`<${Select} label="Answers go to" value=${form.results} options=${others} onInput=${set("results")} />` : html`<${Notice} kind="warn">Make a second queue for the answers first.<//>`}`}
    <${Select} label="After the last try" value=${form.dead} options=${[{ value: "", label: "Deleted" }, ...others]} onInput=${set("dead")} />
    <${TextField} label="At a time" type="number" min="1" max="100" value=${form.batch} onInput=${set("batch")} />
    <${TextField} label="Tries after the first" type="number" min="0" max="100" value=${form.retries} onInput=${set("retries")} />
    <${TextField} label="Lease in seconds" type="number" min="0" max="43200" step="any" value=${form.lease} onInput=${set("lease")} /><//>`;
}
