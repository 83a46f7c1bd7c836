// A batch from a file, or from what is typed.
import { ai, send } from "../core/api.js";
import { asOptions, models } from "../core/catalog.js";
import { count, money, neurons } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Button, Select, TextArea } from "../ui/controls.js";
import { Dialog } from "../ui/dialog.js";
import { Drop } from "../ui/drop.js";
import { Loaded, Notice } from "../ui/states.js";
import { toast } from "../ui/toast.js";

const EXAMPLE = '{"prompt": "What does math.sqrt do?"}\n{"prompt": "What does math.cos do?"}';

// Bytes of a long file that an estimate looks at.
const LOOKED_AT = 1 << 20;

export function NewBatch({ onClose, onDone }) {
  const catalog = useResource((signal) => models(signal), []);
  const [model, setModel] = useState("");
  const [text, setText] = useState("");
  const [file, setFile] = useState(null);
  const [error, setError] = useState("");
  const [estimate, setEstimate] = useState(null);
  const chosen = model || catalog.data?.[0]?.id || "";
  const ask = async (body, headers = {}) => {
    setError("");
    try {
      return (await (await send("POST", ai("/batches"), { query: { model: chosen }, body, headers: { "content-type": "application/jsonl", ...headers } })).json()).result;
    } catch (failure) {
      setError(failure.message);
      return null;
    }
  };
  const sendIt = async () => {
    if (!(await ask(file ?? text))) return;
    toast("The batch is queued");
    onDone();
  };
  const foresee = async () => {
    const whole = !file || file.size <= LOOKED_AT;
    const body = whole ? (file ?? text) : (await file.slice(0, LOOKED_AT).text()).replace(/\n[^\n]*$/, "\n");
    const told = await ask(body, { "x-estimate": "true" });
    setEstimate(told && { ...told, of: whole ? "" : `Its first ${count(told.requests)} requests: ` });
  };
  const lines = file ? null : text.split("\n").filter((line) => line.trim()).length;
  return html`<${Dialog} wide title="New batch" onClose=${onClose} foot=${html`
      <${Button} disabled=${!file && !lines} onClick=${foresee}>What would it cost?<//>
      <${Button} main disabled=${!file && !lines} onClick=${sendIt}>Send the batch<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    <${Loaded} of=${catalog}>${(list) => html`<${Select} label="Model" value=${chosen} options=${asOptions(list)} onInput=${setModel} />`}<//>
    <${Drop} label=${file ? file.name : "A file of requests"} hint="JSON lines: on each the body of one request to the model" accept=".jsonl,.ndjson,.json,.txt" onFiles=${([one]) => { setFile(one); setEstimate(null); }} />
    ${file ? html`<div><${Button} small onClick=${() => setFile(null)}>Type requests instead<//></div>`
      : html`<${TextArea} code label="Or type them" hint="One JSON object on each line" rows="6" value=${text} onInput=${(value) => { setText(value); setEstimate(null); }} placeholder=${EXAMPLE} />`}
    ${estimate && html`<${Notice} title="Estimate:" role="status">${estimate.of}${neurons(estimate.neurons?.expected)} neurons expected, ${neurons(estimate.neurons?.most)} at most${estimate.cost ? `; ${money({ amount: estimate.cost.expected, currency: estimate.cost.currency })} expected, ${money({ amount: estimate.cost.most, currency: estimate.cost.currency })} at most` : ""}.<//>`}
  <//>`;
}
