// A form for any other task, made from the JSON schema of the model's input.
import { schema } from "../core/catalog.js";
import { bytes } from "../core/format.js";
import { html, useEffect, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Code } from "../ui/code.js";
import { Button, Check, Select, TextArea, TextField } from "../ui/controls.js";
import { Drop } from "../ui/drop.js";
import { Card, Empty, Loaded } from "../ui/states.js";
import { Outcome } from "./outcome.js";
import { run } from "./run.js";

export default function TaskForm({ model }) {
  const described = useResource((signal) => schema(model.id, signal), [model.id]);
  return html`<${Loaded} of=${described} tall>${(told) => html`<${Form} model=${model} input=${told.input} />`}<//>`;
}

/** The fields of a schema; of several alternatives those of the first. */
export function fields(input) {
  const chosen = input.oneOf?.[0] ?? input.anyOf?.[0] ?? input;
  const needed = new Set(chosen.required ?? []);
  return Object.entries(chosen.properties ?? {}).map(([name, about]) => ({ name, about, needed: needed.has(name) }));
}

const isFile = ({ name, about }) => about.format === "binary" || about.contentEncoding === "base64" || ["image", "audio", "file"].includes(name);

function Form({ model, input }) {
  const list = fields(input);
  const [values, setValues] = useState({});
  const [done, setDone] = useState(null);
  useEffect(() => () => { if (done?.media) URL.revokeObjectURL(done.media.url); }, [done]);
  const set = (name) => (value) => setValues((old) => ({ ...old, [name]: value }));
  const missing = list.filter((one) => one.needed && (values[one.name] ?? "") === "");
  const submit = async () => setDone(await run(model.id, body(list, values)));
  return html`<div class="grid-2">
    <${Card} title="Input" note=${model.description}><div class="stack">
      ${list.map((one) => html`<${Input} key=${one.name} field=${one} value=${values[one.name] ?? ""} set=${set(one.name)} />`)}
      <div><${Button} main disabled=${missing.length > 0} onClick=${submit}>Run<//></div>
      ${missing.length > 0 && html`<p class="hint">Needed: ${missing.map((one) => one.name).join(", ")}</p>`}</div><//>
    <${Card} title="Answer">${done
      ? html`<div class="stack">${done.media ? html`<${Media} media=${done.media} />` : html`<${Shown} result=${done.result} />`}<${Outcome} done=${done} /></div>`
      : html`<${Empty} icon="playground" title="Nothing run yet">The answer appears here.<//>`}<//>
  </div>`;
}

function Input({ field, value, set }) {
  const { name, about, needed } = field;
  const label = needed ? `${name} (needed)` : name;
  const hint = about.description;
  if (isFile(field)) return html`<${FileInput} label=${label} hint=${hint} value=${value} set=${set} />`;
  if (about.enum) return html`<${Select} label=${label} hint=${hint} value=${value} onInput=${set} options=${[{ value: "", label: "default" }, ...about.enum.map(String)]} />`;
  if (about.type === "boolean") return html`<${Check} label=${label} hint=${hint} checked=${value === "" ? Boolean(about.default) : value} onInput=${set} />`;
  if (about.type === "integer" || about.type === "number") {
    return html`<${TextField} label=${label} hint=${hint} type="number" min=${about.minimum} max=${about.maximum} step=${about.type === "integer" ? 1 : "any"}
      placeholder=${about.default ?? ""} value=${value} onInput=${set} />`;
  }
  const plain = about.type === "string" || (Array.isArray(about.type) && about.type.includes("string"));
  return html`<${TextArea} label=${plain ? label : `${label}, as JSON`} code=${!plain} hint=${hint} rows=${plain ? 3 : 4} value=${value} onInput=${set} />`;
}

function FileInput({ label, hint, value, set }) {
  const [preview, setPreview] = useState(null);
  const take = async ([file]) => {
    if (preview) URL.revokeObjectURL(preview.url);
    setPreview({ type: file.type, url: URL.createObjectURL(file), name: file.name, size: file.size });
    const raw = new Uint8Array(await file.arrayBuffer());
    let text = "";
    for (let at = 0; at < raw.length; at += 32_768) text += String.fromCharCode(...raw.subarray(at, at + 32_768));
    set(btoa(text));
  };
  return html`<div class="stack-s"><${Drop} label=${label} hint=${hint} onFiles=${take} />
    ${value && preview && html`<${Media} media=${preview} /><p class="hint wrap">${preview.name}, ${bytes(preview.size)}</p>`}</div>`;
}

function Media({ media }) {
  if (media.type.startsWith("image/")) return html`<img src=${media.url} alt="" />`;
  if (media.type.startsWith("audio/")) return html`<audio controls src=${media.url}></audio>`;
  return html`<p><a href=${media.url} download="answer">Save the file</a></p>`;
}

function Shown({ result }) {
  if (typeof result?.image === "string") return html`<img src=${`data:image/png;base64,${result.image}`} alt="The model's picture" />`;
  return html`<${Code} label="Answer" text=${JSON.stringify(result, null, 2)} />`;
}

/** What is typed, as the schema's types. Raises an Error that names a field whose JSON does not parse. */
export function body(list, values) {
  const asked = {};
  for (const { name, about } of list) {
    const value = values[name];
    if (value === undefined || value === "") continue;
    if (about.type === "integer" || about.type === "number") asked[name] = Number(value);
    else if (about.type === "boolean" || about.type === "string" || about.enum || typeof value !== "string") asked[name] = value;
    else {
      try {
        asked[name] = JSON.parse(value);
      } catch (error) {
        if (!Array.isArray(about.type)) throw new Error(`${name} is no JSON: ${error.message}`);
        asked[name] = value;
      }
    }
  }
  return asked;
}
