// Buttons and fields.
import { classes, html, newId, useState } from "../core/lib.js";
import { Icon } from "./icons.js";
import { toastError } from "./toast.js";

/**
 * A button. While what it started runs it cannot be pressed again; what fails is told in a toast.
 * @param {{icon?: string, label?: string, main?: boolean, bad?: boolean, quiet?: boolean, small?: boolean, type?: string,
 *   disabled?: boolean, href?: string, onClick?: (event: Event) => any, children?: any}} props  `label` names one without text
 */
export function Button({ icon, label, main, bad, quiet, small, type = "button", disabled, href, onClick, children, ...rest }) {
  const [busy, setBusy] = useState(false);
  const text = Array.isArray(children) ? children.some((one) => one) : Boolean(children);
  const name = classes("button", main && "button-main", bad && "button-bad", quiet && "button-quiet", small && "button-small", !text && "button-icon");
  const size = small ? 15 : 17;
  if (href) return html`<a class=${name} href=${href} aria-label=${label} title=${label} ...${rest}>${icon && html`<${Icon} name=${icon} size=${size} />`}${children}</a>`;
  const press = onClick && (async (event) => {
    const result = onClick(event);
    if (!result?.then) return;
    setBusy(true);
    try {
      await result;
    } catch (error) {
      toastError(error);
    }
    setBusy(false);
  });
  return html`<button class=${name} type=${type} disabled=${disabled || busy} aria-label=${label} title=${label} onClick=${press} ...${rest}>
    ${busy ? html`<${Icon} name="spinner" size=${size} class="spin" />` : icon && html`<${Icon} name=${icon} size=${size} />`}${children}
  </button>`;
}

/** A label above a control, with a hint or an error below. `children` is a function of the attributes that tie them together. */
export function Field({ label, hint, error, hideLabel, children }) {
  const [id] = useState(() => newId("field"));
  const described = error ? `${id}-error` : hint ? `${id}-hint` : undefined;
  return html`<div class="field">
    <label for=${id} class=${hideLabel ? "sr-only" : ""}>${label}</label>
    ${children({ id, "aria-describedby": described, "aria-invalid": error ? "true" : undefined })}
    ${hint && !error && html`<span class="hint" id=${`${id}-hint`}>${hint}</span>`}
    ${error && html`<span class="field-error" id=${`${id}-error`} role="alert">${error}</span>`}
  </div>`;
}

/** A line of text. */
export const TextField = ({ label, hint, error, hideLabel, value, onInput, ...rest }) => html`<${Field} ...${{ label, hint, error, hideLabel }}>
  ${(tie) => html`<input class="input" type="text" ...${tie} ...${rest} value=${value} onInput=${(event) => onInput(event.currentTarget.value)} />`}<//>`;

/** Several lines of text. */
export const TextArea = ({ label, hint, error, hideLabel, value, onInput, code, ...rest }) => html`<${Field} ...${{ label, hint, error, hideLabel }}>
  ${(tie) => html`<textarea class=${classes("textarea", code && "textarea-code")} spellcheck=${!code} ...${tie} ...${rest} value=${value}
    onInput=${(event) => onInput(event.currentTarget.value)}></textarea>`}<//>`;

/** @param {{options: ({value: string, label: string, group?: string}|string)[]}} props  options of a group stand together */
export function Select({ label, hint, error, hideLabel, value, options, onInput, ...rest }) {
  const items = options.map((one) => (typeof one === "string" ? { value: one, label: one } : one));
  const groups = [...new Set(items.map((one) => one.group ?? ""))];
  const option = (one) => html`<option value=${one.value} selected=${one.value === value} disabled=${one.disabled}>${one.label}</option>`;
  return html`<${Field} ...${{ label, hint, error, hideLabel }}>
    ${(tie) => html`<select class="select" ...${tie} ...${rest} value=${value} onChange=${(event) => onInput(event.currentTarget.value)}>
      ${groups.map((group) => {
        const inside = items.filter((one) => (one.group ?? "") === group).map(option);
        return group ? html`<optgroup label=${group}>${inside}</optgroup>` : inside;
      })}
    </select>`}<//>`;
}

export const Check = ({ label, hint, checked, onInput, ...rest }) => html`<label class="check">
  <input type="checkbox" checked=${checked} ...${rest} onChange=${(event) => onInput(event.currentTarget.checked)} />
  <span>${label}${hint && html`<br /><span class="hint">${hint}</span>`}</span></label>`;

/** A number by slider and by hand; empty is the model's own. */
export function Range({ label, hint, value, onInput, min, max, step, placeholder }) {
  return html`<${Field} label=${label} hint=${hint}>
    ${(tie) => html`<div class="range-row">
      <input type="range" aria-label=${`${label} slider`} min=${min} max=${max} step=${step} value=${value === "" ? placeholder : value} onInput=${(event) => onInput(event.currentTarget.value)} />
      <input class="input num" type="number" ...${tie} min=${min} max=${max} step=${step} value=${value} placeholder=${placeholder} onInput=${(event) => onInput(event.currentTarget.value)} />
    </div>`}<//>`;
}

/** A choice of few, as buttons in one box. @param {{label: string, value: string, options: {value: string, label: any}[]}} props */
export const Segments = ({ label, value, options, onInput }) => html`<div class="segments" role="group" aria-label=${label}>
  ${options.map((one) => html`<button type="button" class="segment" key=${one.value} aria-pressed=${one.value === value ? "true" : "false"} onClick=${() => onInput(one.value)}>${one.label}</button>`)}
</div>`;

/** Tabs; arrow keys move between them. */
export function Tabs({ label, value, options, onInput }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = options.findIndex((one) => one.value === value);
    const next = options[(at + step + options.length) % options.length];
    onInput(next.value);
    event.currentTarget.children[(at + step + options.length) % options.length].focus();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${move}>
    ${options.map((one) => html`<button type="button" role="tab" class="tab" key=${one.value} aria-selected=${one.value === value ? "true" : "false"}
      tabindex=${one.value === value ? 0 : -1} onClick=${() => onInput(one.value)}>${one.label}</button>`)}
  </div>`;
}
