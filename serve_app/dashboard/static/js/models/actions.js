// Start, stop and scale a model; for the operator.
import { ai, post } from "../core/api.js";
import { html, useState } from "../core/lib.js";
import { Button, TextField } from "../ui/controls.js";
import { confirm, Dialog } from "../ui/dialog.js";
import { toast } from "../ui/toast.js";

export function Actions({ model, state, reload }) {
  const [scaling, setScaling] = useState(false);
  const act = async (action, rest = {}) => {
    await post(ai("/models/actions"), { model: model.id, action, ...rest });
    toast(action === "start" ? "Starting" : action === "stop" ? "Stopping" : "Scaling");
    await reload();
  };
  const stop = async () => {
    const sure = await confirm({ title: `Stop ${model.id}?`, text: "Requests under way are answered; later ones wait or are refused until it is started again.", action: "Stop model" });
    if (sure) await act("stop");
  };
  const off = state && ["stopped", "failed", "idle"].includes(state.state);
  return html`${off ? html`<${Button} icon="play" onClick=${() => act("start")}>Start<//>` : html`<${Button} icon="stop" onClick=${stop}>Stop<//>`}
    <${Button} icon="compare" onClick=${() => setScaling(true)}>Scale<//>
    ${scaling && html`<${Scale} model=${model} onClose=${() => setScaling(false)} act=${act} />`}`;
}

function Scale({ model, onClose, act }) {
  const [replicas, setReplicas] = useState("1");
  const save = async () => {
    await act("scale", { replicas: Number(replicas) });
    onClose();
  };
  return html`<${Dialog} title=${`Scale ${model.id}`} onClose=${onClose} foot=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} main disabled=${!/^\d+$/.test(replicas)} onClick=${save}>Scale<//>`}>
    <${TextField} label="Replicas of each stage" type="number" min="0" max="64" step="1" value=${replicas} onInput=${setReplicas} hint="The record's bounds still hold" /><//>`;
}
