// Limits of accounts and keys, as fields of a form.
import { html } from "../core/lib.js";
import { TextField } from "../ui/controls.js";

export const LIMITS = [
  { name: "requests_per_minute", label: "Requests a minute", step: 1 },
  { name: "tokens_per_minute", label: "Tokens a minute", step: 1 },
  { name: "streams", label: "Streams at once", step: 1 },
  { name: "neurons_per_day", label: "Neurons a day", step: "any" },
  { name: "money_per_month", label: "Money a month", step: "any" },
];

/** Limits as a form holds them: text, empty for none. */
export const asForm = (limits = {}) => Object.fromEntries(LIMITS.map(({ name }) => [name, limits[name] === undefined || limits[name] === null ? "" : String(limits[name])]));

/** What the API takes: null takes a limit away. */
export const fromForm = (form) => Object.fromEntries(LIMITS.map(({ name, step }) => [name, form[name] === "" ? null : step === 1 ? Number(form[name]) : form[name]]));

export const LimitFields = ({ form, setForm }) => html`<fieldset class="stack-s"><legend class="label">Limits</legend>
  <p class="hint">An empty one is no limit.</p>
  <div class="form-grid">${LIMITS.map(({ name, label, step }) => html`<${TextField} key=${name} label=${label} type="number" min="0" step=${step} value=${form[name]}
    onInput=${(value) => setForm({ ...form, [name]: value })} placeholder="none" />`)}</div></fieldset>`;

/** Limits in words, for a table. */
export const told = (limits = {}) => LIMITS.filter(({ name }) => limits[name] !== undefined && limits[name] !== null)
  .map(({ name, label }) => `${label}: ${Number(limits[name]).toLocaleString("en-US")}`);
