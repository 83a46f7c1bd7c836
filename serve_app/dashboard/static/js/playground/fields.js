// The fields of a task's form, from the JSON schema of a model's input; and the body that is made of what is typed.

/**
 * @typedef {Object} Field
 * @property {string} name
 * @property {Object} about    its schema
 * @property {"file"|"choice"|"yes"|"number"|"text"|"json"} shape
 * @property {boolean} needed
 */

/** The fields of a schema; of several alternatives those of the first, and what all have. @returns {Field[]} */
export function fields(input) {
  const [first = {}, ...others] = input.oneOf ?? input.anyOf ?? [];
  const needed = new Set([...(input.required ?? []), ...(first.required ?? [])]);
  // What only another alternative needs is another name of what this one has.
  const names = new Set(others.flatMap((one) => one.required ?? []).filter((name) => !needed.has(name)));
  return Object.entries({ ...input.properties, ...first.properties })
    .filter(([name]) => !names.has(name))
    .map(([name, about]) => ({ name, about, shape: shape(about), needed: needed.has(name) }));
}

function shape(about) {
  const ways = about.oneOf ?? about.anyOf ?? [about];
  const types = ways.flatMap((one) => one.type ?? []);
  if (ways.some((one) => one.format === "binary" || one.contentEncoding === "base64")) return "file";
  if (about.enum) return "choice";
  if (types.includes("string")) return "text";
  if (types.includes("boolean")) return "yes";
  return types.includes("integer") || types.includes("number") ? "number" : "json";
}

/** An input that the schema shows, without files: those are for a person to choose. */
export function example(input, list = fields(input)) {
  const shown = input.examples?.[0] ?? {};
  return Object.fromEntries(list.filter((one) => one.shape !== "file" && one.name in shown).map(({ name }) => [name, shown[name]]));
}

/** What is typed into a field for a value of its type. */
export const typed = ({ shape: kind }, value) => (kind === "json" ? JSON.stringify(value) : kind === "yes" ? value : String(value));

/** What is typed, as the schema's types. Raises an Error that names a field whose JSON does not parse. */
export function body(list, values) {
  const asked = {};
  for (const { name, about, shape: kind } of list) {
    const value = values[name];
    if (value === undefined || value === "") continue;
    if (kind === "number") asked[name] = Number(value);
    else if (kind === "choice") asked[name] = about.enum.find((one) => String(one) === value);
    else if (kind === "file") asked[name] = value.data;
    else if (kind === "json") asked[name] = parsed(name, value);
    else asked[name] = value;
  }
  return asked;
}

function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is no JSON: ${error.message}`);
  }
}
