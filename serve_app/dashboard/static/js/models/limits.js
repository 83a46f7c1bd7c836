// What a model takes: the bounds and defaults of its input's fields, and how much of it this account may have.
import { get } from "../core/api.js";
import { schema } from "../core/catalog.js";
import { count } from "../core/format.js";
import { html } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { session } from "../core/session.js";
import { told } from "../keys/limits.js";
import { Card, Loaded } from "../ui/states.js";
import { Table } from "../ui/table.js";

const plain = (value) => (typeof value === "number" ? value.toLocaleString("en-US", { maximumFractionDigits: 6 }) : String(value));

// What only a number's type bounds is no limit.
const ENDLESS = 2 ** 31 - 1;

/** The bounds of one field in words; "" for one that has none. */
export function bounds(about) {
  const ways = [about, ...(about.oneOf ?? about.anyOf ?? [])];
  const first = (name) => ways.find((one) => one[name] !== undefined)?.[name];
  const [low, most] = [first("minimum") ?? first("exclusiveMinimum"), first("maximum") ?? first("exclusiveMaximum")];
  const high = most >= ENDLESS ? undefined : most;
  const parts = [];
  if (low !== undefined && high !== undefined) parts.push(`${plain(low)} to ${plain(high)}`);
  else if (high !== undefined) parts.push(`at most ${plain(high)}`);
  else if (low !== undefined) parts.push(`at least ${plain(low)}`);
  if (about.enum) parts.push(about.enum.map(plain).join(", "));
  if (first("maxLength") !== undefined) parts.push(`at most ${count(first("maxLength"))} characters`);
  if (first("maxItems") !== undefined) parts.push(`at most ${count(first("maxItems"))} items`);
  if (first("maxProperties") !== undefined) parts.push(`at most ${count(first("maxProperties"))}`);
  return parts.join("; ");
}

/** Every field of an input that has bounds, once. */
export function limited(input) {
  const found = {};
  for (const one of [input, ...(input.oneOf ?? input.anyOf ?? [])]) {
    for (const [name, about] of Object.entries(one.properties ?? {})) found[name] ??= { name, bounds: bounds(about), fallback: about.default, about: about.description ?? "" };
  }
  return Object.values(found).filter((one) => one.bounds);
}

export function Limits({ model }) {
  const known = useResource(async (signal) => {
    const [described, accounts] = await Promise.all([schema(model.id, signal), get("/client/v4/accounts", { per_page: 1000 }, { signal })]);
    return { rows: limited(described.input), account: accounts.find((one) => one.id === session().account) };
  }, [model.id]);
  return html`<${Card} title="Limits" note="Of what one request may hold" bare><div class="table-top"><${Loaded} of=${known}>${({ rows, account }) => html`
    <${Table} label="Limits" rows=${rows} id=${(one) => one.name} columns=${[
      { key: "name", label: "Field", by: (one) => one.name, cell: (one) => html`<code>${one.name}</code>` },
      { key: "bounds", label: "Bounds", cell: (one) => html`<span class="wrap">${one.bounds}</span>` },
      { key: "fallback", label: "Default", cell: (one) => html`<span class="wrap">${one.fallback === undefined || one.fallback === null ? "–" : plain(typeof one.fallback === "object" ? JSON.stringify(one.fallback) : one.fallback)}</span>` },
      { key: "about", label: "What it does", cell: (one) => html`<span class="small wrap">${one.about}</span>` },
    ]} /><p class="card-body small muted">This account: ${told(account?.limits).join(", ") || "no limits are set"}.</p>`}<//></div><//>`;
}
