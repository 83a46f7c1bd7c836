// A record for a further model, by form; checked by the server before it is added.
import { ai, post } from "../core/api.js";
import { html, useState } from "../core/lib.js";
import { Button, Select, TextArea, TextField } from "../ui/controls.js";
import { Dialog } from "../ui/dialog.js";
import { Notice } from "../ui/states.js";
import { toast } from "../ui/toast.js";

const TASKS = ["text-generation", "text-embeddings", "reranking"];

const quoted = (text) => JSON.stringify(text);

/** The form as a record in YAML. */
export function asRecord(form) {
  const lines = [`id: ${quoted(form.id)}`, `task: ${form.task}`, `description: ${quoted(form.description)}`, `created_at: ${quoted(new Date().toISOString().slice(0, 10))}`];
  lines.push(form.path ? `weights: {path: ${quoted(form.path)}}` : `weights: {repo: ${quoted(form.repo)}, revision: ${quoted(form.revision)}}`);
  if (form.window) lines.push(form.task === "text-generation" ? `properties: {context_window: ${Number(form.window)}}` : `properties: {max_input_tokens: ${Number(form.window)}}`);
  lines.push(`dtype: ${form.dtype}`);
  if (form.input || form.output) lines.push(`price: {${[form.input && `input: ${Number(form.input)}`, form.output && `output: ${Number(form.output)}`].filter(Boolean).join(", ")}}`);
  if (form.serving.trim()) lines.push("serving:", ...form.serving.split("\n").map((line) => `  ${line}`));
  return `${lines.join("\n")}\n`;
}

export function AddRecord({ onClose, onDone }) {
  const [form, setForm] = useState({ id: "", task: TASKS[0], description: "", path: "", repo: "", revision: "", window: "", dtype: "float32", input: "", output: "", serving: "local:\n  decode: {num_cpus: 1}\n  prefill: {num_cpus: 1}" });
  const [told, setTold] = useState(null);
  const set = (name) => (value) => { setTold(null); setForm((old) => ({ ...old, [name]: value })); };
  const ask = async (check) => {
    setTold(null);
    try {
      await post(ai("/models/records"), { record: asRecord(form), check });
      if (check) {
        setTold({ kind: "good", text: "The record is good." });
        return;
      }
      toast(`${form.id} is added`);
      await onDone();
      onClose();
    } catch (error) {
      setTold({ kind: "bad", text: error.message });
    }
  };
  const text = (name, label, rest = {}) => html`<${TextField} label=${label} value=${form[name]} onInput=${set(name)} ...${rest} />`;
  return html`<${Dialog} wide title="Add a model" onClose=${onClose} foot=${html`<${Button} onClick=${() => ask(true)}>Check<//><${Button} main disabled=${!form.id} onClick=${() => ask(false)}>Add the model<//>`}>
    ${told && html`<${Notice} kind=${told.kind} role="alert">${told.text}<//>`}
    <div class="form-grid">${text("id", "Id", { placeholder: "@cf/me/mine" })}<${Select} label="Task" value=${form.task} options=${TASKS} onInput=${set("task")} /></div>
    ${text("description", "Description", { placeholder: "What it is good for." })}
    <div class="form-grid">${text("path", "Folder of the weights", { placeholder: "a/directory", hint: "On the server; or a repository:" })}${text("repo", "Repository", { placeholder: "me/mine" })}${text("revision", "Revision", { placeholder: "a commit" })}</div>
    <div class="form-grid">${text("window", "Context window, in tokens", { type: "number", min: 1 })}<${Select} label="Number format" value=${form.dtype} options=${["float32", "bfloat16"]} onInput=${set("dtype")} />
      ${text("input", "Price per M input tokens", { type: "number", min: 0, step: "any" })}${text("output", "Price per M output tokens", { type: "number", min: 0, step: "any" })}</div>
    <${TextArea} code label="Serving" hint="Resources of each stage, by profile, in YAML" rows="4" value=${form.serving} onInput=${set("serving")} />
  <//>`;
}
