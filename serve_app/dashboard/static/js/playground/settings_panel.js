// Settings of one lane. What is left empty is the model's own.
import { ai, get } from "../core/api.js";
import { yes } from "../core/catalog.js";
import { html } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { schema } from "../core/catalog.js";
import { Range, Select, TextArea, TextField } from "../ui/controls.js";

const SLIDERS = [
  ["temperature", "Temperature", 0, 2, 0.05, "0 always takes the likeliest token"],
  ["top_p", "Top p", 0, 1, 0.01],
  ["top_k", "Top k", 0, 200, 1],
  ["repetition_penalty", "Repetition penalty", 0, 2, 0.05],
];

const TOOL = `[{"name": "get_weather", "description": "Get the current weather of a city",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]`;
const SCHEMA = `{"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}`;

export function SettingsPanel({ lane, model, changed }) {
  const { settings } = lane;
  const set = (name) => (value) => {
    settings[name] = value;
    changed();
  };
  const described = useResource((signal) => schema(lane.model, signal), [lane.model]);
  const adapters = useResource((signal) => usable(lane.model, signal), [lane.model], { skip: !yes(model?.properties.lora) });
  const fields = described.data?.input?.oneOf?.[0]?.properties ?? described.data?.input?.properties ?? {};
  const own = (name) => fields[name]?.default ?? "";
  const area = (name, label, hint, placeholder) => html`<${TextArea} code label=${label} hint=${hint} placeholder=${placeholder} rows="4"
    error=${problem(settings[name])} value=${settings[name]} onInput=${set(name)} />`;
  return html`
    <${TextArea} label="System prompt" rows="3" value=${settings.system} onInput=${set("system")} placeholder="You are a helpful assistant." />
    ${yes(model?.properties.lora) && html`<${Select} label="Adapter" value=${settings.adapter} onInput=${set("adapter")}
      options=${[{ value: "", label: "None" }, ...(adapters.data ?? [])]} />`}
    ${SLIDERS.map(([name, label, min, max, step, hint]) => html`<${Range} key=${name} ...${{ label, min, max, step, hint }} value=${settings[name]} placeholder=${String(own(name))} onInput=${set(name)} />`)}
    <${TextField} label="Most tokens" type="number" min="1" value=${settings.max_tokens} onInput=${set("max_tokens")} placeholder="as many as fit" />
    <${TextField} label="Seed" type="number" min="0" value=${settings.seed} onInput=${set("seed")} placeholder="random" hint="The same seed gives the same answer" />
    ${yes(model?.properties.reasoning) && html`<${Select} label="Reasoning effort" value=${settings.reasoning} onInput=${set("reasoning")}
      options=${[{ value: "", label: "The model's own" }, "none", "low", "medium", "high"]} />`}
    ${yes(model?.properties.function_calling) && area("tools", "Tools", "JSON: functions the model may call", TOOL)}
    ${area("schema", "JSON schema", "The answer is held to it", SCHEMA)}`;
}

function problem(text) {
  if (!text.trim()) return "";
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return error.message;
  }
}

/** The account's adapters and the public ones that belong to a model. */
async function usable(model, signal) {
  const [own, open] = await Promise.all([get(ai("/finetunes"), {}, { signal }), get(ai("/finetunes/public"), {}, { signal })]);
  const found = new Map([...open, ...own].filter((one) => one.model === model).map((one) => [one.id, { value: one.id, label: one.name }]));
  return [...found.values()];
}
