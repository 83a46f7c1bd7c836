// What stands in a place that has no data: yet, at all, or because something failed. And badges, figures, page heads.
import { classes, html } from "../core/lib.js";
import { Button } from "./controls.js";
import { Icon } from "./icons.js";

export const Badge = ({ kind = "", dot, title, children }) => html`<span class=${`badge ${kind && `badge-${kind}`}`} title=${title}>${dot && html`<span class="dot" aria-hidden="true"></span>`}${children}</span>`;

/** @param {{kind?: "info"|"good"|"warn"|"bad", title?: string, children?: any, action?: any}} props */
export const Notice = ({ kind = "info", title, children, action, ...rest }) => html`<div class=${`notice notice-${kind}`} ...${rest}>
  <${Icon} name=${kind === "good" ? "check" : kind} /><div>${title && html`<strong>${title}</strong> `}${children}</div>${action}</div>`;

export const Empty = ({ icon = "info", title, children, action }) => html`<div class="empty"><${Icon} name=${icon} /><h3>${title}</h3>${children && html`<p>${children}</p>`}${action}</div>`;

/** What an error says, and what can be done about it. */
export function Failed({ error, reload }) {
  const remedy = error.status === 403 ? "Sign in with a key that has the scope." : error.status === 404 ? "" : error.status === 0 ? "" : error.id ? `Request ${error.id}.` : "";
  return html`<${Notice} kind="bad" role="alert" title=${error.message} action=${reload && html`<${Button} small icon="refresh" onClick=${reload}>Try again<//>`}>${remedy && html`<span class="muted small">${remedy}</span>`}<//>`;
}

export const Skeleton = ({ tall, lines = 3 }) => html`<div class="stack-s" role="status" aria-label="Loading">
  ${tall ? html`<div class="skeleton skeleton-tall"></div>` : Array.from({ length: lines }, (_, at) => html`<div class="skeleton" key=${at} style=${{ width: `${92 - at * 13}%` }}></div>`)}</div>`;

/**
 * Shows a resource: its data through `children`, or that it loads, or why it is not there. Old data stays visible when a
 * later load fails, with the error above.
 */
export function Loaded({ of, tall, lines, children }) {
  if (of.data === undefined) {
    return of.error ? html`<${Failed} error=${of.error} reload=${of.reload} />` : html`<${Skeleton} tall=${tall} lines=${lines} />`;
  }
  return html`${of.error && html`<${Failed} error=${of.error} reload=${of.reload} />`}${children(of.data)}`;
}

/** One number with its unit. @param {{label: string, value: any, unit?: string, note?: any, title?: string}} props */
export const Figure = ({ label, value, unit, note, title }) => html`<div class="card figure" role="group" aria-label=${label}>
  <span class="figure-label">${label}</span>
  <span class=${classes("figure-value", String(value).length > 10 && "figure-long")} title=${title}>${value}${unit && html`<small>${unit}</small>`}</span>
  ${note && html`<span class="figure-note">${note}</span>`}</div>`;

export const Card = ({ title, note, action, children, bare }) => html`<section class="card">
  ${(title || action) && html`<header class="card-head"><div><h2>${title}</h2>${note && html`<p>${note}</p>`}</div>${action}</header>`}
  ${bare ? children : html`<div class="card-body">${children}</div>`}</section>`;

export const PageHead = ({ title, children, action, back }) => html`<header class="page-head"><div>
  ${back && html`<a class="crumb" href=${back.href}><${Icon} name="back" size="15" />${back.label}</a>`}
  <h1>${title}</h1>${children && html`<p>${children}</p>`}</div>${action && html`<div class="row">${action}</div>`}</header>`;

/** A share of something, drawn. @param {{share: number, label: string}} props */
export function Meter({ share, label, plain }) {
  const kind = plain ? "" : share >= 1 ? "meter-bad" : share >= 0.8 ? "meter-warn" : "";
  return html`<div class=${`meter ${kind}`} role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(share * 100)}>
    <span style=${{ width: `${Math.min(100, share * 100)}%` }}></span></div>`;
}
