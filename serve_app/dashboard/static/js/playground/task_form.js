// A form for any other task, made from the JSON schema of the model's input.
import { schema } from "../core/catalog.js";
import { bytes } from "../core/format.js";
import { html, useEffect, useRef, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Button, Check, Select, TextArea, TextField } from "../ui/controls.js";
import { Drop } from "../ui/drop.js";
import { Card, Empty, Loaded, Meter } from "../ui/states.js";
import { toast } from "../ui/toast.js";
import { body, example, fields, typed } from "./fields.js";
import { Outcome } from "./outcome.js";
import { Media, Result } from "./results.js";
import { run } from "./run.js";

export default function TaskForm({ model }) {
  const described = useResource((signal) => schema(model.id, signal), [model.id]);
  return html`<${Loaded} of=${described} tall>${(told) => html`<${Form} model=${model} input=${told.input} />`}<//>`;
}

function Form({ model, input }) {
  const all = fields(input);
  // What streams always does here: it tells how far it is.
  const streams = all.some((one) => one.name === "stream");
  const list = all.filter((one) => one.name !== "stream");
  const [values, setValues] = useState(() => begun(input, list));
  const [done, setDone] = useState(null);
  const [progress, setProgress] = useState(null);
  const running = useRef(null);
  useEffect(() => () => running.current?.abort(), []);
  useEffect(() => () => { if (done?.media) URL.revokeObjectURL(done.media.url); }, [done]);
  const set = (name) => (value) => setValues((old) => ({ ...old, [name]: value }));
  const missing = list.filter((one) => one.needed && (values[one.name] ?? "") === "");
  const submit = async () => {
    const files = Object.fromEntries(list.filter((one) => one.shape === "file" && values[one.name]).map(({ name }) => [name, values[name]]));
    running.current = new AbortController();
    const options = { signal: running.current.signal, tell: setProgress };
    try {
      setDone({ ...(await run(model.id, { ...body(list, values), ...(streams && { stream: true }) }, options)), files });
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      setProgress(null);
    }
  };
  return html`<div class="grid-2">
    <${Card} title="Input" note=${model.description}><div class="stack">
      ${list.map((one) => html`<${Input} key=${one.name} field=${one} value=${values[one.name] ?? ""} set=${set(one.name)} />`)}
      <div><${Button} main disabled=${missing.length > 0} onClick=${submit}>Run<//></div>
      ${missing.length > 0 && html`<p class="hint">Needed: ${missing.map((one) => one.name).join(", ")}</p>`}</div><//>
    <${Card} title="Answer">${progress && html`<${Steps} of=${progress} stop=${() => running.current.abort()} />`}${done
      ? html`<div class="stack" role="region" aria-label="Answer">${done.media ? html`<${Media} media=${done.media} />` : html`<${Result} key=${done.request} result=${done.result} files=${done.files} />`}<${Outcome} done=${done} /></div>`
      : html`<${Empty} icon="playground" title="Nothing run yet">The answer appears here.<//>`}<//>
  </div>`;
}

const Steps = ({ of: { step, steps }, stop }) => html`<div class="stack-s"><div class="between"><span role="status">Step ${step} of ${steps}</span>
  <${Button} small icon="stop" onClick=${stop}>Stop<//></div><${Meter} plain share=${steps ? step / steps : 0} label="Progress" /></div>`;

/** What stands in the form at first. */
function begun(input, list) {
  const shown = example(input, list);
  return Object.fromEntries(list.filter((one) => one.name in shown).map((one) => [one.name, typed(one, shown[one.name])]));
}

function Input({ field, value, set }) {
  const { name, about, needed, shape } = field;
  const label = needed ? `${name} (needed)` : name;
  const hint = about.description;
  if (shape === "file") return html`<${FileInput} name=${name} label=${label} hint=${hint} value=${value} set=${set} />`;
  if (shape === "choice") return html`<${Select} label=${label} hint=${hint} value=${value} onInput=${set} options=${[{ value: "", label: "default" }, ...about.enum.map(String)]} />`;
  if (shape === "yes") return html`<${Check} label=${label} hint=${hint} checked=${value === "" ? Boolean(about.default) : value} onInput=${set} />`;
  if (shape === "number") {
    return html`<${TextField} label=${label} hint=${hint} type="number" min=${about.minimum} max=${about.maximum} step=${about.type === "integer" ? 1 : "any"}
      placeholder=${about.default ?? ""} value=${value} onInput=${set} />`;
  }
  if (shape === "text" && (!needed || about.maxLength <= SHORT)) return html`<${TextField} label=${label} hint=${hint} placeholder=${about.default ?? ""} value=${value} onInput=${set} />`;
  return html`<${TextArea} label=${shape === "text" ? label : `${label}, as JSON`} code=${shape !== "text"} hint=${hint} rows=${rows(value)} value=${value} onInput=${set} />`;
}

// Characters of what is written in one line.
const SHORT = 256;
const rows = (text) => Math.max(2, Math.min(12, Math.ceil(String(text).length / 60)));
const ACCEPTED = { image: "image/*", mask: "image/*", audio: "audio/*,video/webm,video/mp4" };

function FileInput({ name, label, hint, value, set }) {
  const made = useRef([]);
  useEffect(() => () => made.current.forEach((url) => URL.revokeObjectURL(url)), []);
  const take = async ([file]) => {
    try {
      const url = URL.createObjectURL(file);
      made.current.push(url);
      set({ data: await dataUrl(file), url, type: file.type, name: file.name, size: file.size });
    } catch (error) {
      toast(`${file.name} cannot be read: ${error.message}`, "bad");
    }
  };
  return html`<div class="stack-s"><${Drop} label=${label} hint=${hint} accept=${ACCEPTED[name]} onFiles=${take} />
    ${value && html`<${Media} media=${value} /><p class="hint wrap">${value.name}, ${bytes(value.size)}</p>`}</div>`;
}

const dataUrl = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});
