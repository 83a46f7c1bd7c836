// A new webhook, or events that come into a queue. A webhook's secret is shown once.
import { ai, ofAccount, post } from "../core/api.js";
import { html, useState } from "../core/lib.js";
import { CopyButton } from "../ui/code.js";
import { Button, Check, Select, TextField } from "../ui/controls.js";
import { Dialog } from "../ui/dialog.js";
import { Notice } from "../ui/states.js";
import { toast } from "../ui/toast.js";

const EVENTS = [
  ["batch.*", "Batches of OpenAI's API: completed, failed, cancelled, expired"],
  ["cf.workersAi.model.batch.*", "Batches of the other APIs: queued, succeeded, failed"],
  ["budget.*", "A budget has reached one of its shares"],
];

/** @param {{queues: Object[]|null, onClose: () => void, reload: () => Promise<void>}} props  null: a URL is called */
export function EventsDialog({ queues, onClose, reload }) {
  const [url, setUrl] = useState("");
  const [name, setName] = useState("");
  const [queue, setQueue] = useState(queues?.[0]?.queue_id ?? "");
  const [kinds, setKinds] = useState(queues ? ["cf.workersAi.model.batch.*"] : ["batch.*"]);
  const [made, setMade] = useState(null);
  const [error, setError] = useState("");
  const set = (kind) => (on) => setKinds((old) => (on ? [...old, kind] : old.filter((one) => one !== kind)));
  const save = async () => {
    try {
      if (queues) {
        await post(ofAccount("/event_subscriptions/subscriptions"), { name, events: kinds, source: { type: "workersAi.model" }, destination: { type: "queues.queue", queue_id: queue } });
        toast("Events come into the queue from now on");
        onClose();
      } else {
        setMade(await post(ai("/webhooks"), { url: url.trim(), name, events: kinds }));
        setError("");
      }
      await reload();
    } catch (failure) {
      setError(failure.message);
    }
  };
  const complete = kinds.length > 0 && (queues ? queue : url.trim());
  return html`<${Dialog} title=${queues ? "Events into a queue" : "New webhook"} onClose=${onClose} foot=${made
    ? html`<${Button} main onClick=${onClose}>I have kept it<//>`
    : html`<${Button} onClick=${onClose}>Cancel<//><${Button} main disabled=${!complete} onClick=${save}>Make it<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    ${made ? html`<${Notice} kind="good" title="Keep this secret now; it is shown once.">Messages are signed with it.<//>
      <div class="row"><code class="wrap">${made.secret}</code><${CopyButton} text=${made.secret} label="Copy the secret" /></div>`
    : html`${queues ? html`<${Select} label="Queue" value=${queue} onInput=${setQueue} options=${queues.map((one) => ({ value: one.queue_id, label: one.queue_name }))} />`
      : html`<${TextField} label="URL" type="url" value=${url} onInput=${setUrl} hint="With http or https. It is called by POST, signed as Standard Webhooks are" />`}
      <${TextField} label="Name" value=${name} onInput=${setName} maxlength="120" />
      <fieldset class="stack-s"><legend class="label">Events</legend>${EVENTS.map(([kind, about]) => html`<${Check} key=${kind} label=${kind} hint=${about} checked=${kinds.includes(kind)} onInput=${set(kind)} />`)}</fieldset>`}<//>`;
}
