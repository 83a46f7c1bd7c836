// Decisions: questions about one text, answered by a model that writes text with probabilities and without a text.
import { html, useState } from "../core/lib.js";
import { percent } from "../core/format.js";
import { Button, Check, Select, TextArea, TextField } from "../ui/controls.js";
import { Badge, Card, Empty, Meter } from "../ui/states.js";
import { criteria, KINDS } from "./criteria.js";
import { Outcome } from "./outcome.js";
import { run } from "./run.js";

const EXAMPLE = "My invoice is wrong, and I have written three times!";
const QUESTIONS = [
  { name: "urgent", type: "noul", instructions: "Does it have to be answered today?", criteria: "" },
  { name: "team", type: "choice", instructions: "Whose is it?", criteria: "billing: payments, invoices\nsupport: things that do not work\nother" },
  { name: "anger", type: "score", instructions: "How angry is the writer?", criteria: "calm\nannoyed\nfurious" },
];
const MOST = 64;

export default function DecisionsForm({ model }) {
  const [text, setText] = useState(EXAMPLE);
  const [list, setList] = useState(() => QUESTIONS.map((one, id) => ({ ...one, id })));
  const [calibrate, setCalibrate] = useState(false);
  const [done, setDone] = useState(null);
  const change = (id, name) => (value) => setList((old) => old.map((one) => (one.id === id ? { ...one, [name]: value } : one)));
  const add = () => setList((old) => [...old, { id: Math.max(-1, ...old.map((one) => one.id)) + 1, name: `question ${old.length + 1}`, type: "noul", instructions: "", criteria: "" }]);
  const names = list.map((one) => one.name.trim());
  const twice = names.find((name, at) => names.indexOf(name) !== at);
  const missing = !text.trim() ? "a text" : !list.length ? "a question" : names.includes("") ? "a name for each question" : twice !== undefined ? `another name than ${twice} for one of the questions` : "";
  const decide = async () => {
    const questions = Object.fromEntries(list.map((one) => [one.name.trim(), { type: one.type, instructions: one.instructions, ...criteria(one.type, one.criteria) }]));
    setDone({ ...(await run(model.id, { state: text, questions, calibrate })), list });
  };
  return html`<div class="grid-2">
    <${Card} title="Text and questions" note="Each question gets a probability for every answer; nothing is written."><div class="stack">
      <${TextArea} label="Text" hint="What all questions are about" rows="4" value=${text} onInput=${setText} />
      ${list.map((one) => html`<${Question} key=${one.id} of=${one} change=${change} end=${() => setList((old) => old.filter((other) => other !== one))} />`)}
      <div><${Button} icon="plus" disabled=${list.length >= MOST} onClick=${add}>Add a question<//></div>
      <${Check} label="Calibrate" hint="Takes out what the model would say of no text at all" checked=${calibrate} onInput=${setCalibrate} />
      <div><${Button} main disabled=${Boolean(missing)} onClick=${decide}>Decide<//></div>
      ${missing && html`<p class="hint">Needed: ${missing}</p>`}</div><//>
    <${Card} title="Answers">${done
      ? html`<div class="stack" role="region" aria-label="Answers">${Object.entries(done.result.answers).map(([name, told]) => html`<${Answer} key=${name} name=${name} told=${told} />`)}<${Outcome} done=${done} /></div>`
      : html`<${Empty} icon="check" title="Nothing decided yet">Answers appear here, each with how sure the model is.<//>`}<//>
  </div>`;
}

function Question({ of, change, end }) {
  const kind = KINDS[of.type];
  return html`<fieldset class="card card-body stack-s"><legend class="sr-only">Question ${of.name}</legend>
    <div class="question-row"><${TextField} label="Name" value=${of.name} onInput=${change(of.id, "name")} maxlength="64" />
      <${Select} label="Kind" value=${of.type} onInput=${change(of.id, "type")} options=${Object.entries(KINDS).map(([value, one]) => ({ value, label: one.label }))} />
      <${Button} bad icon="trash" label=${`Remove the question ${of.name}`} onClick=${end} /></div>
    <${TextField} label="Question" value=${of.instructions} onInput=${change(of.id, "instructions")} />
    ${kind.criteria && html`<${TextArea} label=${kind.criteria} hint=${kind.hint} rows="3" value=${of.criteria} onInput=${change(of.id, "criteria")} />`}</fieldset>`;
}

/** One answer: every option with its probability, the likeliest named. */
function Answer({ name, told }) {
  const options = told.probabilities
    ? Object.entries(told.probabilities).map(([key, share]) => ({ label: told.legend?.[key] || key, share }))
    : [{ label: "yes", share: told.noul }, { label: "no", share: 1 - told.noul }];
  const best = told.choice ?? (told.score === undefined ? (told.noul >= 0.5 ? "yes" : "no") : told.score.toFixed(2));
  const sure = told.confidence === undefined ? "" : `confidence ${percent(told.confidence)}, `;
  return html`<section class="stack-s"><div class="between"><h3>${name}</h3><${Badge} kind="accent">${best}<//></div>
    <ul class="ranked" aria-label=${name}>${options.map((one) => html`<li key=${one.label}><div class="between"><span class="wrap">${one.label}</span><strong class="num">${one.share.toFixed(4)}</strong></div>
      <${Meter} plain share=${one.share} label=${`Probability of ${one.label}`} /></li>`)}</ul>
    <p class="hint">${sure}the options had ${percent(told.mass, 1)} of the model's probability</p></section>`;
}
