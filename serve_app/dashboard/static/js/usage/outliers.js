// What stands out: days of the last week on which something used more than on 95 % of the 30 days before.
import { ai, get } from "../core/api.js";
import { date, neurons, rate, shortModel } from "../core/format.js";
import { html } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Badge, Card, Empty, Loaded } from "../ui/states.js";
import { byTime, groups, quantile, starts } from "./sums.js";

const DAYS_BEFORE = 30;
const DAYS_SHOWN = 7;

/**
 * @param {Object[]} rows  of each day and group
 * @param {number[]} times  the days, at least 37 of them
 * @returns {{name: string, time: number, value: number, usual: number}[]}  the most unusual first
 */
export function outliers(rows, times, field) {
  const found = [];
  for (const { name, rows: mine } of groups(rows, field, (row) => Number(row.neurons))) {
    const values = byTime(mine, times, (row) => Number(row.neurons));
    for (let at = Math.max(DAYS_BEFORE, times.length - DAYS_SHOWN); at < times.length; at += 1) {
      const usual = quantile(values.slice(at - DAYS_BEFORE, at), 0.95);
      if (usual > 0 && values[at] > usual) found.push({ name, time: times[at], value: values[at], usual });
    }
  }
  return found.sort((one, other) => other.value / other.usual - one.value / one.usual);
}

export function Outliers({ all }) {
  const found = useResource(async (signal) => {
    const ask = async (field) => {
      const told = await get(ai("/usage"), { since: `${DAYS_BEFORE + DAYS_SHOWN}d`, interval: "day", group_by: field, per_page: 10_000, ...(all ? { account: "all" } : {}) }, { signal, whole: true });
      return outliers(told.result, starts(told.result_info, "day"), field).map((one) => ({ ...one, field }));
    };
    return (await Promise.all(["model", "key"].map(ask))).flat().slice(0, 8);
  }, [all]);
  return html`<${Card} title="What stands out" note="Days of the last week above the 95th percentile of the 30 days before, in neurons"><${Loaded} of=${found}>${(list) => (list.length
    ? html`<ul class="stack-s">${list.map((one) => html`<li class="between" key=${`${one.field} ${one.name} ${one.time}`}>
        <span class="wrap"><${Badge}>${one.field}<//> <strong>${one.field === "model" ? shortModel(one.name) : one.name}</strong> <span class="muted">on ${date(one.time)}</span></span>
        <span class="num">${neurons(one.value)} neurons <${Badge} kind="warn">${rate(one.value / one.usual)} × usual<//></span></li>`)}</ul>`
    : html`<${Empty} icon="check" title="Nothing unusual">No model or key used more than it does on 95 % of its days.<//>`)}<//><//>`;
}
