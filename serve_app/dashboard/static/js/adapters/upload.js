// The upload of an adapter: its record first, then its two files in the order that the API wants them.
import { ai, post } from "../core/api.js";
import { asOptions, models, yes } from "../core/catalog.js";
import { bytes } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Button, Check, Select, TextField } from "../ui/controls.js";
import { Dialog } from "../ui/dialog.js";
import { Drop } from "../ui/drop.js";
import { Loaded, Notice } from "../ui/states.js";
import { toast } from "../ui/toast.js";

const CONFIG = "adapter_config.json";
const WEIGHTS = "adapter_model.safetensors";

export function Upload({ onClose, onDone }) {
  const catalog = useResource(async (signal) => (await models(signal)).filter((one) => yes(one.properties.lora)), []);
  const [form, setForm] = useState({ model: "", name: "", description: "", open: false });
  const [files, setFiles] = useState({});
  const [error, setError] = useState("");
  const [step, setStep] = useState("");
  const [made, setMade] = useState(null);
  const set = (name) => (value) => setForm((old) => ({ ...old, [name]: value }));
  const take = (list) => setFiles((old) => ({ ...old, ...Object.fromEntries(list.map((one) => [one.name.endsWith(".json") ? CONFIG : WEIGHTS, one])) }));
  const complete = files[CONFIG] && files[WEIGHTS] && /^[\w.-]{1,100}$/.test(form.name);
  const save = async () => {
    setError("");
    try {
      setStep("Making the adapter …");
      const model = form.model || catalog.data[0].id;
      const tune = made ?? await post(ai("/finetunes"), { model, name: form.name, description: form.description, public: form.open });
      setMade(tune);
      for (const name of [CONFIG, WEIGHTS]) {
        setStep(`Uploading ${name} …`);
        const body = new FormData();
        body.set("file_name", name);
        body.set("file", files[name], name);
        await post(ai(`/finetunes/${tune.id}/finetune-assets`), body);
      }
      toast(`${form.name} is uploaded`);
      onDone();
    } catch (failure) {
      setError(failure.message);
    }
    setStep("");
  };
  return html`<${Dialog} title="Upload an adapter" onClose=${onClose} foot=${html`<span class="hint push" role="status">${step}</span><${Button} main disabled=${!complete} onClick=${save}>Upload<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}${made && " Mend the file and upload again."}<//>`}
    <${Loaded} of=${catalog}>${(list) => (list.length ? html`<${Select} label="Model" value=${form.model || list[0].id} options=${asOptions(list)} onInput=${set("model")} disabled=${Boolean(made)} />`
      : html`<${Notice} kind="warn">No model that is served here takes adapters.<//>`)}<//>
    <${TextField} label="Name" value=${form.name} onInput=${set("name")} hint="Letters, digits and . _ -" maxlength="100" disabled=${Boolean(made)} />
    <${TextField} label="Description" value=${form.description} onInput=${set("description")} />
    <${Drop} multiple label="The adapter's two files" hint=${`${CONFIG} and ${WEIGHTS}`} accept=".json,.safetensors" onFiles=${take} />
    <ul class="small">${[CONFIG, WEIGHTS].map((name) => html`<li key=${name} class=${files[name] ? "good" : "muted"}>${name}: ${files[name] ? bytes(files[name].size) : "missing"}</li>`)}</ul>
    <${Check} label="Public" hint="Every account of this server may use it" checked=${form.open} onInput=${set("open")} />
  <//>`;
}
