// Prompts and answers: kept only where the operator says so, and here is where he says it.
import { ai, ApiError, get, put, remove } from "../core/api.js";
import { date } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { can, session } from "../core/session.js";
import { Button, Check, TextField } from "../ui/controls.js";
import { confirm, Dialog } from "../ui/dialog.js";
import { Card, Notice } from "../ui/states.js";
import { toast } from "../ui/toast.js";

const PATH = "/prompt-log";

/** Whether prompts of this account are kept, and for the operator the switch. */
export function Kept() {
  const rule = useResource((signal) => get(ai(PATH), {}, { signal }), [], { every: 30 });
  const [open, setOpen] = useState(false);
  const told = rule.data;
  if (!told) return null;
  return html`<div class="row"><span class="small muted">${told.enabled ? `Prompts and answers are kept for ${told.days} days.` : "Prompts and answers are not kept."}</span>
    ${session().operator && html`<${Button} small onClick=${() => setOpen(true)}>${told.enabled ? "Change" : "Keep them"}<//>`}
    ${open && html`<${Switch} rule=${told} onClose=${() => setOpen(false)} onDone=${async () => { setOpen(false); await rule.reload(); }} />`}</div>`;
}

function Switch({ rule, onClose, onDone }) {
  const [days, setDays] = useState(String(rule.days ?? 7));
  const [all, setAll] = useState(rule.all);
  const [error, setError] = useState("");
  const save = async () => {
    try {
      await put(ai(PATH), { days: Number(days), all });
      toast("Prompts and answers are kept from now on");
      await onDone();
    } catch (failure) {
      setError(failure.message);
    }
  };
  const end = async () => {
    if (!(await confirm({ title: "Keep them no more?", text: all ? "What was kept of every account is deleted." : "What was kept of this account is deleted.", action: "Delete them" }))) return;
    await remove(ai(`${PATH}${all ? "?all=true" : ""}`));
    toast("Nothing is kept any more");
    await onDone();
  };
  return html`<${Dialog} title="Prompts and answers" onClose=${onClose} foot=${html`${rule.enabled && html`<${Button} bad onClick=${end}>Keep no more<//>`}<${Button} main onClick=${save}>Keep them<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    <${Notice} kind="warn" title="Tell the people whose prompts they are.">Admins of an account see what is kept of it. Keys are taken out.<//>
    <${TextField} label="Days" type="number" min="0.01" step="any" value=${days} onInput=${setDays} hint="Each is deleted after so long; of each account 256 MiB at most" />
    <${Check} label="Of every account" hint="Else of this one alone" checked=${all} onInput=${setAll} /><//>`;
}

/** What one request asked and was answered, where it is kept. */
export function Prompt({ id }) {
  const found = useResource((signal) => get(ai(`${PATH}/${encodeURIComponent(id)}`), {}, { signal })
    .catch((error) => (error instanceof ApiError && error.status === 404 ? null : Promise.reject(error))), [id], { skip: !can("admin") });
  if (!found.data) return null;
  const end = async () => {
    await remove(ai(`${PATH}/${encodeURIComponent(id)}`));
    toast("Prompt and answer are deleted");
    await found.reload();
  };
  return html`<${Card} title="Prompt and answer" note=${`Kept until ${date(found.data.until)}`} action=${html`<${Button} small bad icon="trash" label="Delete prompt and answer" onClick=${end} />`}>
    <dl class="facts">${parts(found.data.prompt).map(([name, text], at) => html`<dt key=${`${name} ${at}`}>${name}</dt><dd class="wrap prose-plain">${text}</dd>`)}
      ${answers(found.data.answer).map(([name, text], at) => html`<dt key=${`answer ${at}`}>${name}</dt><dd class="wrap prose-plain">${text}</dd>`)}</dl><//>`;
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

function parts(prompt) {
  return Object.entries(prompt).flatMap(([name, value]) => (name === "messages" && Array.isArray(value)
    ? value.map((one) => [one.role ?? "message", asText(one.content ?? one)])
    : [[name, asText(value)]]));
}

function answers(answer) {
  if (!Array.isArray(answer)) return answer ? [["error", asText(answer.error ?? answer)]] : [];
  return answer.flatMap((one) => Object.entries(one).map(([name, value]) => [name === "text" ? "answer" : name.replace("_", " "), asText(value)]));
}
