// Overview: what happens now, how the last hours and weeks went, and what is spent of the budget.
import { get } from "../core/api.js";
import { count, money, neurons, percent, rate, seconds } from "../core/format.js";
import { html } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { link, setQuery } from "../core/router.js";
import { can, session } from "../core/session.js";
import { Budget, spent } from "../keys/budgets.js";
import { series } from "../overview/history.js";
import { Chart } from "../ui/chart.js";
import { Button, Segments } from "../ui/controls.js";
import { Card, Empty, Figure, Loaded, Notice, PageHead } from "../ui/states.js";
import { unitWords } from "../usage/units.js";

// Seconds back, and the length of a step.
const RANGES = { "1h": ["Hour", 3600, 60], "24h": ["Day", 86_400, 900], "30d": ["Month", 30 * 86_400, 86_400] };

export default function Overview({ place }) {
  const range = RANGES[place.query.range] ? place.query.range : "1h";
  const [, back, step] = RANGES[range];
  const now = useResource((signal) => get("/v1/metrics/now", {}, { signal, whole: true }), [], { every: 2 });
  const history = useResource((signal) => get("/v1/metrics/history", { since: Math.floor(Date.now() / 1000) - back, step }, { signal, whole: true }), [range], { every: step > 60 ? 60 : 15 });
  return html`
    <${PageHead} title="Overview" action=${can("inference") && html`<${Button} main icon="playground" href=${link("playground")}>Open the playground<//>`} />
    <${Loaded} of=${now} lines=${4}>${(told) => html`<${Now} told=${told} />`}<//>
    <${Spend} />
    <div class="between"><h2>History</h2><${Segments} label="Time" value=${range} onInput=${(value) => setQuery({ range: value })}
      options=${Object.entries(RANGES).map(([value, [label]]) => ({ value, label }))} /></div>
    <${Loaded} of=${history} tall>${(told) => html`<${History} rows=${told.result} back=${back} step=${told.step} />`}<//>`;
}

const quantiles = (told) => (told?.p50 === null || told?.p50 === undefined ? "no requests in this time" : `p90 ${seconds(told.p90)} · p99 ${seconds(told.p99)}`);

/** The last ten seconds, of all gateways. */
const Now = ({ told }) => html`<section class="grid-figures grid-thirds" aria-label="The last ten seconds" aria-live="off">
  <${Figure} label="Requests" value=${rate(told.requests_per_s)} unit="/s" note=${`${count(told.running)} running, ${count(told.waiting)} waiting${told.runners ? `; ${count(told.runners)} batch runners work` : ""}`} />
  <${Figure} label="Tokens" value=${rate(told.tokens_per_s)} unit="/s" note="written, over all models" />
  <${Figure} label="Time to first token" value=${seconds(told.ttft?.p50)} note=${quantiles(told.ttft)} />
  <${Figure} label="Between tokens" value=${seconds(told.itl?.p50)} note=${quantiles(told.itl)} />
  <${Figure} label="Cached" value=${told.prompt_tokens ? percent(told.cached_tokens / told.prompt_tokens) : "–"} note="of the prompts' tokens" />
  <${Figure} label="Errors" value=${count(told.errors)} note=${`${count(told.refusals)} refused, in the last ${count(told.seconds)} s`} />
</section>`;

function Spend() {
  const used = useResource(async (signal) => {
    const [sums, accounts] = await Promise.all([spent({ id: session().account }, signal), get("/client/v4/accounts", { per_page: 1000 }, { signal })]);
    return { sums, account: accounts.find((one) => one.id === session().account) };
  }, [], { every: 15 });
  return html`<${Loaded} of=${used} lines=${2}>${({ sums, account }) => html`<section class="grid-figures" aria-label="Spend of this account">
    <${Figure} label="Tokens today" value=${count((sums.units.input_tokens ?? 0) + (sums.units.output_tokens ?? 0))} note=${unitWords(sums.units).join(", ") || "nothing was used yet"} />
    <${Budget} label="Neurons today" used=${sums.neurons} of=${account?.limits?.neurons_per_day} show=${neurons} />
    ${(sums.today.length ? sums.today : [{ amount: "0", currency: "USD" }]).map((cost) => html`<${Figure} key=${cost.currency} label="Money today" value=${money(cost)} note="since 00:00 UTC" />`)}
    ${(sums.money.length ? sums.money : [{ amount: "0", currency: "USD" }]).map((cost) => html`<${Budget} key=${cost.currency} label="Money this month" used=${Number(cost.amount)} of=${account?.limits?.money_per_month}
      show=${(value) => money(typeof value === "number" ? cost : { amount: value, currency: cost.currency })} />`)}
  </section>`}<//>`;
}

function History({ rows, back, step }) {
  const until = Math.floor(Date.now() / 1000 / step) * step;
  const { times, of } = series(rows, until - back, until, step);
  if (!rows.length) {
    return html`<${Card}><${Empty} icon="overview" title="No history yet" action=${can("inference") && html`<${Button} href=${link("playground")}>Ask something<//>`}>Each minute with requests gets a point; days are kept for more than a year.<//><//>`;
  }
  const perSecond = (name) => of((row) => row[name] / step);
  const trio = (name) => ["p50", "p90", "p99"].map((part) => ({ name: part, values: of((row) => row[name]?.[part] ?? null, null) }));
  const chart = (title, note, list, show) => html`<${Card} title=${title} note=${note}><${Chart} label=${title} times=${times} series=${list} show=${show} height=${170} /><//>`;
  const failed = rows.reduce((sum, row) => sum + row.errors, 0);
  return html`<div class="grid-2">
    ${chart("Requests", "per second", [{ name: "requests", values: perSecond("requests") }], rate)}
    ${chart("Tokens", "per second", [{ name: "prompt", values: perSecond("prompt_tokens") }, { name: "written", values: perSecond("completion_tokens") }], rate)}
    ${chart("Time to first token", "by share of requests", trio("ttft"), seconds)}
    ${chart("Between tokens", "by share of tokens", trio("itl"), seconds)}
    ${chart("Cached", "share of the prompts' tokens", [{ name: "cached", values: of((row) => (row.prompt_tokens ? row.cached_tokens / row.prompt_tokens : null), null) }], (value) => percent(value))}
    ${chart("Errors and refusals", "number in each step", [{ name: "errors", values: of((row) => row.errors) }, { name: "refused", values: of((row) => row.refusals) }], count)}
  </div>${failed > 0 && html`<${Notice} kind="warn" title=${`${count(failed)} requests failed in this time.`}><a href=${link("requests", "", { status: "failed" })}>Look at them</a><//>`}`;
}
