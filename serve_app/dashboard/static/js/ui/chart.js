// Charts over time, drawn by uPlot. The drawing is for the eye; the same figures are there as a table for everybody.
import { html, useEffect, useRef, useState } from "../core/lib.js";
import { colour } from "../core/theme.js";
import { dateTime, stepped, time } from "../core/format.js";
import { Button } from "./controls.js";
import { Table } from "./table.js";

let library = null;
const load = async () => { library ??= (await import("../../vendor/uPlot.esm.js")).default; return library; };

export const SERIES = 6;

/**
 * @param {{label: string, times: number[], series: {name: string, values: (number|null)[]}[], show: (value: number) => string,
 *   bars?: boolean, height?: number}} props  times in unix seconds; `bars` stacks the series
 */
export function Chart({ label, times, series, show, bars = false, height = 190 }) {
  const place = useRef(null);
  const [table, setTable] = useState(false);
  const shown = series.slice(0, SERIES);
  useEffect(() => {
    let ended = false;
    let plot = null;
    const box = place.current;
    const draw = async () => {
      const UPlot = await load();
      if (ended || !box) return;
      plot?.destroy();
      plot = new UPlot(options(UPlot, box.clientWidth, height, times, shown, show, bars), [times, ...stacked(shown, bars)], box);
    };
    draw();
    const watcher = new ResizeObserver(() => plot?.setSize({ width: box.clientWidth, height }));
    if (box) watcher.observe(box);
    addEventListener("themechange", draw);
    return () => {
      ended = true;
      watcher.disconnect();
      removeEventListener("themechange", draw);
      plot?.destroy();
    };
  }, [JSON.stringify([times, shown]), table]);

  if (table) {
    const rows = times.map((time, at) => ({ id: time, values: shown.map((one) => one.values[at]) }));
    return html`<div class="stack-s"><${Table} label=${label} rows=${rows} sort="-time" columns=${[
      { key: "time", label: "Time", by: (row) => row.id, cell: (row) => html`<span class="nowrap">${stepped(stepOf(times))(row.id)}</span>` },
      ...shown.map((one, at) => ({ key: String(at), label: one.name, right: true, by: (row) => row.values[at] ?? 0, cell: (row) => show(row.values[at]) })),
    ]} /><div><${Button} small quiet onClick=${() => setTable(false)}>Show the chart<//></div></div>`;
  }
  return html`<figure class="chart stack-s"><div class="chart-plot" ref=${place} role="img" aria-label=${`${label}: ${summary(shown, show)}`}></div>
    <div class="between"><ul class="legend">${shown.map((one, at) => html`<li key=${one.name}><span class=${`swatch swatch-${at + 1}`} aria-hidden="true"></span><span class="wrap">${one.name}</span> ${latest(one, show)}</li>`)}</ul>
    <${Button} small quiet onClick=${() => setTable(true)} label=${`${label} as a table`}>Table<//></div></figure>`;
}

const stepOf = (times) => (times.length > 1 ? times[1] - times[0] : 3600);
const last = (one) => one.values.findLast((value) => value !== null && value !== undefined);
const latest = (one, show) => (last(one) === undefined ? "" : show(last(one)));
const summary = (series, show) => series.map((one) => `${one.name} last ${last(one) === undefined ? "none" : show(last(one))}`).join(", ");

/** Each series on top of those before it, in the order they are drawn: the sum of all first. */
function stacked(series, bars) {
  if (!bars) return series.map((one) => one.values);
  const sums = [];
  let below = series[0]?.values.map(() => 0) ?? [];
  for (const one of series) {
    below = below.map((sum, at) => sum + (one.values[at] ?? 0));
    sums.unshift(below);
  }
  return sums;
}

function options(UPlot, width, height, times, series, show, bars) {
  const [line, muted] = [colour("--line"), colour("--muted")];
  const drawn = series.map((one, at) => {
    const tone = colour(`--series-${at + 1}`);
    return { label: one.name, stroke: tone, width: bars ? 0 : 1.75, fill: bars ? tone : undefined, spanGaps: false, points: { show: !bars && one.values.filter((value) => value !== null).length < 30, size: 5 },
      paths: bars ? UPlot.paths.bars({ size: [0.7, 36], radius: 0.15 }) : undefined };
  });
  const step = stepOf(times);
  const axis = { stroke: muted, font: "11px system-ui, sans-serif", ticks: { show: false } };
  return {
    width, height, cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } }, legend: { show: false },
    scales: { x: { range: (_, low, high) => (bars ? [low - step / 2, high + step / 2] : [low, high]) }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.1 : 1] } },
    axes: [
      { ...axis, grid: { show: false }, size: 34, space: 80, values: (_, values) => ticks(values, step) },
      { ...axis, grid: { stroke: line, width: 1 }, size: 64, space: 40, values: (_, values) => values.map(show) },
    ],
    series: [{}, ...(bars ? drawn.reverse() : drawn)],
    plugins: [tooltip(series, show, stepped(step))],
  };
}

/** Times of an axis: days where there are days, and the clock where there are hours, on 24 of them. */
function ticks(values, step) {
  if (step >= 86_400) return values.map((value) => stepped(step)(value).replace(/ \d{4}$/, ""));
  const days = values.at(-1) - values[0] > 2 * 86_400;
  return values.map((value) => (days ? dateTime(value).split(",")[0] : time(value).slice(0, 5)));
}

/** A box beside the pointer with the figures of that moment. */
function tooltip(series, show, when) {
  const box = document.createElement("div");
  box.className = "chart-tip";
  box.hidden = true;
  return { hooks: {
    init: (plot) => { plot.over.append(box); plot.over.addEventListener("mouseleave", () => { box.hidden = true; }); },
    setCursor: (plot) => {
      const { idx, left } = plot.cursor;
      box.hidden = idx === null || idx === undefined || left < 0;
      if (box.hidden) return;
      box.replaceChildren(...[when(plot.data[0][idx]), ...series.map((one) => `${one.name}  ${show(one.values[idx])}`)].map((text) => {
        const row = document.createElement("div");
        row.textContent = text;
        return row;
      }));
      box.style.left = `${Math.max(0, Math.min(left + 12, plot.over.clientWidth - box.offsetWidth))}px`;
    },
  } };
}
