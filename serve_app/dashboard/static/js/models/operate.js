// What an operator does with models by hand: start, stop, scale, remove a record that was added.
import { ai, get, post, remove } from "../core/api.js";
import { shortModel } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { session } from "../core/session.js";
import { Button, Select, TextField } from "../ui/controls.js";
import { confirm, Dialog } from "../ui/dialog.js";
import { Badge, Card, Notice } from "../ui/states.js";
import { Table } from "../ui/table.js";
import { toast } from "../ui/toast.js";

/** Every record there is, by model; nothing for who is not the operator. */
export const records = async (signal) => (session().operator ? get(ai("/models/records"), {}, { signal }) : []);

const act = (model, action, more = {}) => post(ai("/models/actions"), { model, action, ...more });

/** Buttons for one model. @param {{record: Object, reload: () => Promise<void>, small?: boolean}} props */
export function Actions({ record, reload, small }) {
  const [scaling, setScaling] = useState(false);
  const [sharing, setSharing] = useState(false);
  const name = shortModel(record.model);
  const start = async () => {
    await act(record.model, "start");
    toast(`${name} is starting`);
    await reload();
  };
  const stop = async () => {
    if (!(await confirm({ title: `Stop ${name}?`, text: "Its workers end, for every account, and stay ended after a restart. Requests under way may be lost.", action: "Stop model" }))) return;
    await act(record.model, "stop");
    toast(`${name} is stopped`);
    await reload();
  };
  const forget = async () => {
    if (!(await confirm({ title: `Remove ${name}?`, text: "Its record goes. Weights stay where they are.", action: "Remove record" }))) return;
    await remove(ai(`/models/records/${record.model}`));
    toast(`${name} is removed`);
    await reload();
  };
  return html`${record.started
    ? html`<${Button} small=${small} icon="cluster" onClick=${() => setScaling(true)}>Scale<//>${!small && html`<${Button} onClick=${() => setSharing(true)}>Canary<//>`}<${Button} small=${small} bad icon="stop" onClick=${stop}>Stop<//>`
    : html`${record.startable && html`<${Button} small=${small} main=${!small} icon="play" onClick=${start}>Start<//>`}${record.source === "added" && html`<${Button} small=${small} bad icon="trash" label=${`Remove ${name}`} onClick=${forget} />`}`}
    ${scaling && html`<${Scale} record=${record} onClose=${() => setScaling(false)} onDone=${async () => { setScaling(false); await reload(); }} />`}
    ${sharing && html`<${Share} record=${record} onClose=${() => setSharing(false)} onDone=${async () => { setSharing(false); await reload(); }} />`}`;
}

/** Which share of the model's requests another one answers. */
function Share({ record, onClose, onDone }) {
  const [to, setTo] = useState(record.canary?.model ?? "");
  const [percent, setPercent] = useState(String(record.canary?.percent ?? 5));
  const [error, setError] = useState("");
  const save = async (canary) => {
    try {
      await act(record.model, "canary", { canary });
      toast(canary ? `${canary.percent} % of ${shortModel(record.model)} go to ${shortModel(canary.model)}` : `${shortModel(record.model)} answers everything again`);
      await onDone();
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<${Dialog} title=${`Canary of ${shortModel(record.model)}`} onClose=${onClose} foot=${html`${record.canary && html`<${Button} bad onClick=${() => save(null)}>End<//>`}<${Button} main onClick=${() => save({ model: to.trim(), percent: Number(percent) })}>Save<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    ${record.canary && !record.canary.ready && html`<${Notice} kind="warn">${shortModel(record.canary.model)} is not ready: it gets none.<//>`}
    <p class="hint">A session stays with the version that it has. Usage and metrics are of the model that answers.</p>
    <${TextField} label="Goes to" value=${to} onInput=${setTo} placeholder="@cf/author/name-v2" />
    <${TextField} label="Percent of requests" type="number" min="0" max="100" step="any" value=${percent} onInput=${setPercent} /><//>`;
}

function Scale({ record, onClose, onDone }) {
  const stages = Object.keys(record.stages);
  const [stage, setStage] = useState(stages[0]);
  const [form, setForm] = useState({});
  const [error, setError] = useState("");
  const value = (name) => form[`${stage} ${name}`] ?? String(record.stages[stage][name]);
  const set = (name) => (text) => setForm((old) => ({ ...old, [`${stage} ${name}`]: text }));
  const save = async () => {
    try {
      await act(record.model, "scale", { stage, min_replicas: Number(value("min_replicas")), max_replicas: Number(value("max_replicas")) });
      toast(`${shortModel(record.model)} is scaled`);
      await onDone();
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<${Dialog} title=${`Scale ${shortModel(record.model)}`} onClose=${onClose} foot=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} main onClick=${save}>Scale<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    <p class="hint">Between these bounds the number of workers follows the load.</p>
    <${Select} label="Stage" value=${stage} onInput=${setStage} options=${stages} />
    <${TextField} label="At least" type="number" min="0" value=${value("min_replicas")} onInput=${set("min_replicas")} />
    <${TextField} label="At most" type="number" min="1" value=${value("max_replicas")} onInput=${set("max_replicas")} /><//>`;
}

/** Models that do not run. */
export function Resting({ list, reload }) {
  const rows = list.filter((one) => !one.started);
  if (!rows.length) return null;
  return html`<${Card} title="Not running" note="Records of the catalogue that could be started here" bare><div class="table-top"><${Table} label="Models that do not run" rows=${rows} id=${(one) => one.model} columns=${[
    { key: "model", label: "Model", by: (one) => one.model, cell: (one) => html`<div><strong class="wrap">${shortModel(one.model)}</strong> ${one.source === "added" && html`<${Badge}>added<//>`}<br /><span class="small muted wrap">${one.problem ?? one.description}</span></div>` },
    { key: "task", label: "Task", by: (one) => one.task, cell: (one) => one.task.replaceAll("-", " ") },
    { key: "profiles", label: "Profiles", cell: (one) => one.profiles.join(", ") || "none" },
    { key: "actions", label: "", cell: (one) => html`<${Actions} small record=${one} reload=${reload} />` },
  ]} /></div><//>`;
}
