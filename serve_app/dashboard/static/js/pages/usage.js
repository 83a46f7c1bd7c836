// Usage: sums of the ledger over time, by what one chooses; as CSV; and what stands out.
import { ai, download, get } from "../core/api.js";
import { compact, count, money, neurons, seconds, shortModel, stepped } from "../core/format.js";
import { html } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { setQuery } from "../core/router.js";
import { session } from "../core/session.js";
import { Chart, SERIES } from "../ui/chart.js";
import { Button, Segments, Select } from "../ui/controls.js";
import { Card, Empty, Figure, Loaded, PageHead } from "../ui/states.js";
import { Table } from "../ui/table.js";
import { Outliers } from "../usage/outliers.js";
import { add, byTime, costs, groups, starts } from "../usage/sums.js";
import { otherUnits } from "../usage/units.js";

const RANGES = { "24h": ["24 hours", "hour"], "7d": ["7 days", "day"], "30d": ["30 days", "day"], "365d": ["12 months", "month"] };
const MEASURES = {
  neurons: ["Neurons", (row) => Number(row.neurons), (value) => neurons(Math.round(value * 1e6) / 1e6)],
  requests: ["Requests", (row) => row.requests, count],
  cost: ["Money", (row) => Number(row.cost?.amount ?? 0), (value, currency) => money({ amount: (Math.round(value * 1e9) / 1e9).toFixed(9), currency })],
  tokens: ["Tokens", (row) => (row.units.input_tokens ?? 0) + (row.units.output_tokens ?? 0), compact],
};

// What sums are by where they are by the hour, day or month alone.
const TIME = "time";
const STEPS = { hour: 3600, day: 86_400, month: 30 * 86_400 };

export default function Usage({ place }) {
  const who = session();
  const range = RANGES[place.query.range] ? place.query.range : "7d";
  const group = place.query.by ?? "model";
  const measure = MEASURES[place.query.show] ? place.query.show : "neurons";
  const all = who.operator && place.query.accounts !== "own";
  const query = { since: range, interval: RANGES[range][1], ...(group === TIME ? {} : { group_by: group }), per_page: 10_000, ...(all ? { account: "all" } : {}) };
  const usage = useResource((signal) => get(ai("/usage"), query, { signal, whole: true }), [range, group, all], { every: 15 });
  const kinds = ["model", "task", "key", "adapter", "batch", "status", ...(all ? ["account"] : []), { value: TIME, label: RANGES[range][1] }];
  return html`
    <${PageHead} title="Usage" action=${html`<${Button} icon="download" onClick=${() => download(ai("/usage"), { ...query, format: "csv" }, `usage-${range}-by-${group === TIME ? RANGES[range][1] : group}.csv`)}>CSV<//>`}>
      Everything that was used, summed exactly from the ledger. Days are those of UTC.<//>
    <div class="filters">
      <div class="field"><span class="label">Time</span><${Segments} label="Time" value=${range} onInput=${(value) => setQuery({ range: value })} options=${Object.entries(RANGES).map(([value, [label]]) => ({ value, label }))} /></div>
      <${Select} label="By" value=${group} onInput=${(value) => setQuery({ by: value })} options=${kinds} />
      <${Select} label="Show" value=${measure} onInput=${(value) => setQuery({ show: value })} options=${Object.entries(MEASURES).map(([value, [label]]) => ({ value, label }))} />
      ${who.operator && html`<${Select} label="Of" value=${all ? "all" : "own"} onInput=${(value) => setQuery({ accounts: value })} options=${[{ value: "all", label: "All accounts" }, { value: "own", label: "This account" }]} />`}
    </div>
    <${Loaded} of=${usage} tall>${(told) => (told.result.length
      ? html`<${Sums} rows=${told.result} info=${told.result_info} group=${group} measure=${measure} interval=${RANGES[range][1]} />`
      : html`<${Card}><${Empty} icon="usage" title="Nothing was used in this time">Sums appear here about a quarter of a second after an answer.<//><//>`)}<//>
    <${Outliers} all=${all} />`;
}

function Sums({ rows, info, group, measure, interval }) {
  const [label, value, written] = MEASURES[measure];
  const show = (number) => written(number, costs(rows)[0]?.currency ?? "USD");
  const by = groups(rows, group, value);
  const times = starts(info, interval);
  const apart = group === TIME ? [{ name: "all", rows }] : by;
  const series = apart.slice(0, SERIES - 1).map((one) => ({ name: nameOf(one.name, group), values: byTime(one.rows, times, value) }));
  const rest = apart.slice(SERIES - 1);
  const word = group === TIME ? interval : group;
  const nameIn = (one) => (group === TIME ? stepped(STEPS[interval])(one.name) : nameOf(one.name, group));
  if (rest.length) series.push({ name: `${rest.length} more`, values: byTime(rest.flatMap((one) => one.rows), times, value) });
  const total = add(rows);
  const other = otherUnits(total.units);
  return html`<div class="stack">
    <div class="grid-figures">
      <${Figure} label="Requests" value=${count(total.requests)} />
      <${Figure} label="Neurons" value=${neurons(total.neurons)} />
      ${costs(rows).map((cost) => html`<${Figure} key=${cost.currency} label="Money" value=${money(cost)} />`)}
      <${Figure} label="Tokens" value=${count((total.units.input_tokens ?? 0) + (total.units.output_tokens ?? 0))} note=${[`${count(total.units.cached_tokens ?? 0)} of them cached`, ...other].join(", ")} />
    </div>
    <${Card} title=${`${label} by ${word}`}><${Chart} label=${`${label} by ${word}`} times=${times} series=${series} show=${show} bars /><//>
    <${Card} title="Sums" note="Input, cached and output are tokens" bare><div class="table-top"><${Table} key=${group} label=${`Usage by ${word}`} sort=${group === TIME ? "-name" : "-neurons"} rows=${by} id=${(one) => one.name} columns=${[
      { key: "name", label: word[0].toUpperCase() + word.slice(1), by: (one) => one.name, cell: (one) => html`<span class="wrap table-name">${nameIn(one)}</span>` },
      { key: "requests", label: "Requests", right: true, by: (one) => one.sum.requests, cell: (one) => count(one.sum.requests) },
      { key: "input", label: "Input", right: true, by: (one) => one.sum.units.input_tokens ?? 0, cell: (one) => count(one.sum.units.input_tokens ?? 0) },
      { key: "cached", label: "Cached", right: true, by: (one) => one.sum.units.cached_tokens ?? 0, cell: (one) => count(one.sum.units.cached_tokens ?? 0) },
      { key: "output", label: "Output", right: true, by: (one) => one.sum.units.output_tokens ?? 0, cell: (one) => count(one.sum.units.output_tokens ?? 0) },
      ...(other.length ? [{ key: "units", label: "Other units", cell: (one) => html`<span class="wrap">${otherUnits(one.sum.units).join(", ")}</span>` }] : []),
      { key: "seconds", label: "Time", right: true, by: (one) => one.sum.seconds, cell: (one) => seconds(one.sum.seconds) },
      { key: "neurons", label: "Neurons", right: true, by: (one) => one.sum.neurons, cell: (one) => neurons(one.sum.neurons) },
      { key: "cost", label: "Money", right: true, by: (one) => Number(costs(one.rows)[0]?.amount ?? 0), cell: (one) => costs(one.rows).map((cost) => html`<div key=${cost.currency}>${money(cost)}</div>`) },
    ]} /></div><//></div>`;
}

const nameOf = (name, group) => (name === "" ? "none" : group === "model" ? shortModel(name) : name);
