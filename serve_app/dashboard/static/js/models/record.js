// The YAML of a record from what is typed into a form. Strings are written as JSON, which YAML reads, so that nothing typed
// becomes another field.

export const WRITES = "text-generation";

/** The stage that requests of a task are sent to: the first one of a record that has any. */
export const stageOf = (known, task) => Object.keys(known.find((one) => one.task === task && Object.keys(one.stages).length)?.stages ?? {})[0] ?? "predictor";

/** Profiles, the one first that the models have which can be started here. */
export function profilesOf(known) {
  const able = known.filter((one) => one.startable).map((one) => one.profiles);
  const all = [...new Set(known.flatMap((one) => one.profiles))];
  const shared = (name) => able.filter((list) => list.includes(name)).length;
  return all.sort((one, other) => shared(other) - shared(one));
}

const text = (value) => JSON.stringify(value.trim());
const inside = (entries) => `{${entries.filter(([, value]) => value).map(([name, value]) => `${name}: ${value}`).join(", ")}}`;
// What is no number is left to the server's checks.
const number = (value) => (value.trim() === "" ? "" : Number.isFinite(Number(value)) ? String(Number(value)) : text(value));

/** As YAML's floats, which a price is. */
const decimal = (value) => number(value).replace(/^(\d+)(?=e|$)/, "$1.0");

/** What a form lacks that every record has, in words; "" if nothing. */
export function lacks(form) {
  if (!form.id.trim()) return "Id is empty: @cf/author/name, as clients will ask for the model.";
  if (form.source === "repo" && !form.repo.trim()) return "Repository is empty: author/name of the weights on Hugging Face.";
  if (form.source === "path" && !form.path.trim()) return "Folder is empty: where the weights lie on the server.";
  return "";
}

/** @returns {string} */
export function compose(form, stage) {
  const weights = form.source === "path" ? [["path", text(form.path)]] : [["repo", text(form.repo)], ["revision", form.revision.trim() && text(form.revision)]];
  const gpu = form.profile === "gpu";
  const writes = form.task === WRITES;
  const cache = form.cache.trim() || (gpu ? "" : "1GiB");
  const worker = inside([["min_replicas", number(form.least)], ["max_replicas", number(form.most)], [gpu ? "num_gpus" : "num_cpus", number(form.size)], ["kv_cache_bytes", writes && cache && text(cache)]]);
  const price = inside([["input", decimal(form.input)], ["output", writes && decimal(form.output)]]);
  return [
    `id: ${text(form.id)}`,
    `task: ${form.task}`,
    `description: ${text(form.description)}`,
    `created_at: "${new Date().toISOString().slice(0, 10)}"`,
    `weights: ${inside(weights)}`,
    ...(writes && form.context.trim() ? [`properties: {context_window: ${number(form.context)}}`] : []),
    ...(price === "{}" ? [] : [`price: ${price}`]),
    "serving:",
    `  ${form.profile}:`,
    `    ${stage}: ${worker}`,
    "",
  ].join("\n");
}
