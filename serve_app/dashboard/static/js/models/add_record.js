// A new record: by a form for what most have, or as YAML for everything; with the checks of the server.
import { ai, post } from "../core/api.js";
import { html, useState } from "../core/lib.js";
import { Button, Segments, Select, TextArea, TextField } from "../ui/controls.js";
import { Dialog } from "../ui/dialog.js";
import { Notice } from "../ui/states.js";
import { toast } from "../ui/toast.js";
import { compose, lacks, profilesOf, stageOf, WRITES } from "./record.js";

const WAYS = [{ value: "form", label: "Form" }, { value: "yaml", label: "YAML" }];

/** @param {{known: Object[], onClose: () => void, onDone: () => any}} props  `known`: the records that there are */
export function AddRecord({ known, onClose, onDone }) {
  const profiles = profilesOf(known);
  const tasks = [...new Set(known.map((one) => one.task).filter(Boolean))].sort();
  const [way, setWay] = useState("form");
  const [text, setText] = useState("");
  const [told, setTold] = useState(null);
  const [form, setForm] = useState({
    id: "@cf/me/mine", task: tasks.includes(WRITES) ? WRITES : (tasks[0] ?? WRITES), description: "", source: "repo", repo: "", revision: "", path: "",
    context: "", input: "", output: "", profile: profiles[0] ?? "local", size: "1", cache: "", least: "1", most: "1",
  });
  const set = (name) => (value) => { setForm((old) => ({ ...old, [name]: value })); setTold(null); };
  const record = way === "yaml" ? text : compose(form, stageOf(known, form.task));
  const turn = (value) => {
    if (value === "yaml") setText(record);
    setWay(value);
    setTold(null);
  };
  const send = async (check) => {
    const lacking = way === "form" ? lacks(form) : "";
    if (lacking) {
      setTold({ kind: "bad", text: lacking });
      return;
    }
    try {
      const found = await post(ai("/models/records"), { record, check });
      setTold({ kind: "good", text: `${found.model} is a good record.` });
      if (!check) {
        toast(`${found.model} is added; start it when you like`);
        await onDone();
      }
    } catch (failure) {
      setTold({ kind: "bad", text: failure.message });
    }
  };
  const field = (name, label, more = {}) => html`<${TextField} label=${label} value=${form[name]} onInput=${set(name)} ...${more} />`;
  return html`<${Dialog} wide title="Add a model" onClose=${onClose} foot=${html`<${Button} onClick=${() => send(true)}>Check<//><${Button} main disabled=${!record.trim()} onClick=${() => send(false)}>Add<//>`}>
    ${told && html`<${Notice} kind=${told.kind} role="alert">${told.text}<//>`}
    <div><${Segments} label="How to write it" value=${way} options=${WAYS} onInput=${turn} /></div>
    ${way === "yaml" ? html`<${TextArea} label="Record" code rows="16" value=${text} onInput=${(value) => { setText(value); setTold(null); }} hint="With the fields and checks of a file in the state directory's folder models" />` : html`
      <div class="form-grid">${field("id", "Id", { hint: "@cf/author/name: what clients ask for" })}<${Select} label="Task" value=${form.task} onInput=${set("task")} options=${tasks} /></div>
      ${field("description", "Description", { placeholder: "What it is good for" })}
      <div class="form-grid"><${Select} label="Weights from" value=${form.source} onInput=${set("source")} options=${[{ value: "repo", label: "Hugging Face" }, { value: "path", label: "A folder on the server" }]} />
        ${form.source === "repo" ? html`${field("repo", "Repository", { placeholder: "Qwen/Qwen3-0.6B" })}${field("revision", "Revision", { placeholder: "main" })}` : field("path", "Folder", { placeholder: "/srv/models/mine" })}</div>
      <div class="form-grid">${form.task === WRITES && field("context", "Context window", { type: "number", min: "1", hint: "Tokens; empty: not told" })}
        ${field("input", "Price of a million input tokens", { type: "number", min: "0", step: "any", placeholder: "none" })}
        ${form.task === WRITES && field("output", "Price of a million output tokens", { type: "number", min: "0", step: "any", placeholder: "none" })}</div>
      <div class="form-grid"><${Select} label="Runs on" value=${form.profile} onInput=${set("profile")} options=${[{ value: "local", label: "CPUs (local)" }, { value: "gpu", label: "GPUs (gpu)" }]} />
        ${field("size", form.profile === "gpu" ? "GPUs of a worker" : "CPUs of a worker", { type: "number", min: "0", step: "any" })}
        ${form.task === WRITES && field("cache", "KV cache", { placeholder: form.profile === "gpu" ? "what is left" : "1GiB", hint: "Of each worker" })}
        ${field("least", "Workers at least", { type: "number", min: "0" })}${field("most", "Workers at most", { type: "number", min: "1" })}</div>`}<//>`;
}
