// One answer: its reasoning folded, its text, its calls of tools, and what it took.
import { html, useEffect, useState } from "../core/lib.js";
import { count, money, ms, neurons, percent, rate } from "../core/format.js";
import { facts, pathOf } from "../core/path.js";
import { link } from "../core/router.js";
import { can } from "../core/session.js";
import { CopyButton } from "../ui/code.js";
import { Button, TextArea } from "../ui/controls.js";
import { Icon } from "../ui/icons.js";
import { Markdown } from "../ui/markdown.js";
import { Badge, Notice } from "../ui/states.js";
import { Waterfall } from "../ui/waterfall.js";

/** @param {{message: Object, last: boolean, again: () => void, result: Function, told: Object[]}} props */
export function AnswerView({ message, last, again, result, told }) {
  const thinking = message.busy && !message.content && message.reasoning;
  const waiting = message.busy && !message.content && !message.reasoning && !message.calls.length;
  return html`
    ${message.reasoning && html`<details class="reasoning"><summary>${thinking ? "Thinking …" : "Reasoning"}</summary><div class="said muted">${message.reasoning}</div></details>`}
    ${waiting && html`<p class="muted row" role="status"><${Icon} name="spinner" size="15" class="spin" />${message.note || "Waiting for the first token"}</p>`}
    ${message.content && html`<${Markdown} text=${message.content} />`}
    ${message.calls.map((call) => html`<${Call} key=${call.id} call=${call} done=${told.some((one) => one.tool_call_id === call.id)} ready=${!message.busy && last} result=${result} />`)}
    ${message.error && html`<${Notice} kind="bad" role="alert" title=${message.error} action=${last && html`<${Button} small icon="refresh" onClick=${again}>Try again<//>`} />`}
    ${!message.busy && html`<div class="message-foot">
      ${message.stopped && html`<${Badge}>stopped<//>`}
      ${message.finish === "length" && html`<${Badge} kind="warn" title="Raise the most tokens in the settings">cut at the limit<//>`}
      ${message.content && html`<${CopyButton} text=${message.content} label="Copy answer" quiet />`}
      ${last && !message.error && html`<${Button} small quiet icon="refresh" label="Answer again" onClick=${again} />`}
    </div>`}
    <${Stats} message=${message} />`;
}

function Call({ call, done, ready, result }) {
  const [text, setText] = useState("");
  return html`<div class="call"><p><${Badge} kind="accent">calls<//> <strong class="mono wrap">${call.name}</strong></p>
    <pre class="said mono" tabindex="0">${pretty(call.arguments)}</pre>
    ${!done && ready && html`<form class="stack-s" onSubmit=${(event) => { event.preventDefault(); result(call, text); }}>
      <${TextArea} code label="What the tool answers" rows="2" value=${text} onInput=${setText} placeholder='{"temperature": 21}' />
      <div><${Button} small main type="submit" disabled=${!text.trim()}>Give the result<//></div></form>`}</div>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Figures of an answer: while it streams by this page's clock, then as the server measured them. */
function Stats({ message }) {
  const [path, setPath] = useState(null);
  const [open, setOpen] = useState(false);
  const { clock, usage, request, busy } = message;
  useEffect(() => {
    if (busy || !request || message.error || !can("read")) return undefined;
    const controller = new AbortController();
    pathOf(request, controller.signal).then(setPath, () => {});
    return () => controller.abort();
  }, [busy, request]);
  if (!clock?.first) return null;
  const told = path ? facts(path) : {};
  const prompt = usage?.prompt_tokens;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const rows = [
    ["Time to first token", ms(told.ttft_ms ?? clock.first - clock.sent)],
    ["Tokens per second", told.tokens_per_s ? rate(told.tokens_per_s) : null],
    ["Prompt", usage && `${count(prompt)} tokens`],
    ["Cached", usage && percent(prompt ? cached / prompt : 0)],
    ["Answer", usage && `${count(usage.completion_tokens)} tokens`],
    ["Drafts accepted", told.drafted ? `${count(told.accepted)} of ${count(told.drafted)}` : null],
    ["Neurons", usage?.neurons !== undefined && neurons(usage.neurons)],
    ["Cost", usage?.cost && money(usage.cost)],
  ].filter(([, value]) => value);
  return html`<dl class="stats">${rows.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${path && html`<div class="trace"><button type="button" class="button button-quiet button-small" aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(!open)}>
        <${Icon} name=${open ? "down" : "right"} size="14" />Trace</button>
      ${open && html`<div class="stack-s"><${Waterfall} path=${path} /><p class="hint"><a href=${link("requests", request)}>Request <span class="mono">${request}</span></a></p></div>`}</div>`}`;
}
