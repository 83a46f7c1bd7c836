// Prices of a model, as the catalogue tells them.
import { html } from "../core/lib.js";
import { Table } from "../ui/table.js";

const digits = (value) => new Intl.NumberFormat("en-US", { maximumFractionDigits: 6 }).format(value);
const SIGNS = { USD: "$", EUR: "€", GBP: "£" };

/** An amount of a price, such as $0.01. */
export const amount = (one) => (SIGNS[one.currency] ? `${SIGNS[one.currency]}${digits(one.price)}` : `${digits(one.price)} ${one.currency}`);

/** All prices in one line, for a card. */
export const priceLine = (model) => (model.properties.price ?? []).map((one) => `${amount(one)} ${one.unit.replace("per M ", "/ M ").replace(" tokens", "")}`).join(" · ");

export function Prices({ model }) {
  const rows = model.properties.price ?? [];
  if (!rows.length) return html`<p class="muted">This model has no price: its use is counted and costs nothing.</p>`;
  return html`<${Table} label="Prices" rows=${rows} id=${(one) => one.unit} columns=${[
    { key: "unit", label: "Unit", cell: (one) => one.unit },
    { key: "price", label: "Price", right: true, cell: amount },
    { key: "neurons", label: "Neurons", right: true, cell: (one) => (one.neurons === undefined ? "–" : digits(one.neurons)) },
  ]} />`;
}
