// Where the K/V of prompts came from, and what the tiers of the cache did.
import { bytes, count, percent } from "../core/format.js";
import { html } from "../core/lib.js";
import { Meter } from "../ui/states.js";

const WORDS = {
  own: "own blocks", node: "another worker of the node", disk: "the disk", remote: "another node", prefilled: "prefilled for it", computed: "computed",
};

export function Sources({ counts }) {
  const rows = Object.entries(counts).filter(([, number]) => number);
  const all = rows.reduce((sum, [, number]) => sum + number, 0);
  return html`<section class="stack-s"><h3>Prompt tokens by source</h3>${all
    ? html`<ul class="bars">${rows.map(([name, number]) => html`<li class="bar-row" key=${name}><span>${WORDS[name] ?? name}</span><span class="num">${count(number)} · ${percent(number / all)}</span><${Meter} plain share=${number / all} label=${WORDS[name] ?? name} /></li>`)}</ul>`
    : html`<p class="muted">No prompt was read yet.</p>`}</section>`;
}

export function Tiers({ workers }) {
  const pools = workers.map((one) => one.pool).filter(Boolean);
  if (!pools.length) return null;
  const sum = (name) => pools.reduce((all, one) => all + (one[name] ?? 0), 0);
  const rows = [["Read from the shared cache", sum("bytes_read")], ["of it from disk", sum("disk_bytes")], ["of it from other nodes", sum("remote_bytes")], ["Published", sum("published_bytes")]];
  const failures = sum("lookup_failures") + sum("read_failures") + sum("bad_chunks") + sum("publish_failures");
  return html`<section class="stack-s"><h3>Shared KV cache</h3><dl class="facts">${rows.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${bytes(value)}</dd>`)}
    <dt>Fetches</dt><dd>${count(sum("fetches"))}${failures ? `, ${count(failures)} failed` : ""}</dd></dl></section>`;
}
