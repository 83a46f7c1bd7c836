// A new queue, or the name and settings of one.
import { ofAccount, patch, post } from "../core/api.js";
import { html, useState } from "../core/lib.js";
import { Button, TextField } from "../ui/controls.js";
import { Dialog } from "../ui/dialog.js";
import { Notice } from "../ui/states.js";
import { toast } from "../ui/toast.js";

export function QueueDialog({ queue, onClose, onDone }) {
  const [form, setForm] = useState({
    name: queue?.queue_name ?? "",
    delay: String(queue?.settings.delivery_delay ?? 0),
    hours: String((queue?.settings.message_retention_period ?? 4 * 86_400) / 3600),
  });
  const [error, setError] = useState("");
  const set = (name) => (value) => setForm((old) => ({ ...old, [name]: value }));
  const save = async () => {
    const body = { queue_name: form.name.trim(), settings: { delivery_delay: Number(form.delay), message_retention_period: Math.round(Number(form.hours) * 3600) } };
    try {
      await (queue ? patch(ofAccount(`/queues/${queue.queue_id}`), body) : post(ofAccount("/queues"), body));
      toast(queue ? "The queue is changed" : `${form.name} is made`);
      await onDone();
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<${Dialog} title=${queue ? "Settings" : "New queue"} onClose=${onClose} foot=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} main disabled=${!form.name.trim()} onClick=${save}>${queue ? "Save" : "Make the queue"}<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    <${TextField} label="Name" value=${form.name} onInput=${set("name")} maxlength="63" hint="Letters, digits, - and _" />
    <${TextField} label="Delay in seconds" type="number" min="0" max="86400" value=${form.delay} onInput=${set("delay")} hint="Before a message can be taken" />
    <${TextField} label="Kept for hours" type="number" min="0.02" max="336" step="any" value=${form.hours} onInput=${set("hours")} /><//>`;
}
