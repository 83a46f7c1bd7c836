// Tables: sorted by a click on a column's head, scrolling sideways where the screen is narrow.
import { html, useState } from "../core/lib.js";
import { Icon } from "./icons.js";

/**
 * @typedef {Object} Column
 * @property {string} key
 * @property {any} label
 * @property {(row: any) => any} [cell]   what is shown; the field `key` unless given
 * @property {(row: any) => number|string} [by]  what it is sorted by; not sortable without
 * @property {boolean} [right]  numbers stand on the right
 */

/** @param {{label: string, columns: Column[], rows: any[], sort?: string, id?: (row: any) => string, foot?: any}} props  `sort` such as "-cost" */
export function Table({ label, columns, rows, sort = "", id = (row) => row.id, foot }) {
  const [order, setOrder] = useState(sort);
  const column = columns.find((one) => one.key === order.replace("-", "") && one.by);
  const down = order.startsWith("-");
  const shown = column ? [...rows].sort((one, other) => compare(column.by(one), column.by(other)) * (down ? -1 : 1)) : rows;
  const head = (one) => {
    if (!one.by) return one.label;
    const mine = column === one;
    return html`<button type="button" class="sort" onClick=${() => setOrder(mine && down ? one.key : `-${one.key}`)}>${one.label}
      ${mine && html`<${Icon} name=${down ? "sortDown" : "sortUp"} size="14" />`}</button>`;
  };
  return html`<div class="table-box" tabindex="0" role="region" aria-label=${label}><table class="table"><caption class="sr-only">${label}</caption>
    <thead><tr>${columns.map((one) => html`<th key=${one.key} scope="col" class=${one.right ? "right" : ""}
      aria-sort=${column === one ? (down ? "descending" : "ascending") : undefined}>${one.label === "" ? html`<span class="sr-only">Actions</span>` : head(one)}</th>`)}</tr></thead>
    <tbody>${shown.map((row) => html`<tr key=${id(row)}>${columns.map((one) => html`<td key=${one.key} class=${one.label === "" ? "actions" : one.right ? "right" : ""}>${one.cell ? one.cell(row) : row[one.key]}</td>`)}</tr>`)}</tbody>
    ${foot && html`<tfoot>${foot}</tfoot>`}
  </table></div>`;
}

const compare = (one, other) => (typeof one === "number" && typeof other === "number" ? one - other : String(one ?? "").localeCompare(String(other ?? "")));
