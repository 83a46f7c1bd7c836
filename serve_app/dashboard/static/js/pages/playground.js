// Playground: chats, and a form for every other task. Two models or settings can stand side by side.
import { asOptions, kind, models } from "../core/catalog.js";
import { html, useEffect, useState } from "../core/lib.js";
import { setQuery } from "../core/router.js";
import { useResource } from "../core/resource.js";
import { Chat } from "../playground/conversation.js";
import { busy, clear, compare, single, state } from "../playground/lanes.js";
import { Button, Segments, Select } from "../ui/controls.js";
import { Empty, Loaded } from "../ui/states.js";

// What the select has beside models: what is done by none.
const DOCUMENTS = { value: "documents", label: "Documents to Markdown", group: "Without a model" };

const FORMS = {
  decisions: () => import("../playground/decisions.js"),
  documents: () => import("../playground/documents.js"),
  embeddings: () => import("../playground/embeddings.js"),
  rerank: () => import("../playground/rerank.js"),
  form: () => import("../playground/task_form.js"),
  speech: () => import("../playground/task_form.js"),
  pictures: () => import("../playground/task_form.js"),
};

export default function Playground({ place }) {
  const catalog = useResource((signal) => models(signal), []);
  return html`<${Loaded} of=${catalog} tall>${(list) => (list.length
    ? html`<${Lanes} list=${list} place=${place} />`
    : html`<${Empty} icon="models" title="No models yet">Start the server with a model, or add a record on the page Models.<//>`)}<//>`;
}

function Lanes({ list, place }) {
  const [, setRound] = useState(0);
  const changed = () => setRound((round) => round + 1);
  const [first] = state.lanes;
  const wanted = place.query.model;
  const documents = wanted === DOCUMENTS.value;
  if (!list.some((one) => one.id === first.model)) first.model = (list.find((one) => kind(one) === "chat") ?? list[0]).id;
  useEffect(() => {
    if (wanted && wanted !== first.model && list.some((one) => one.id === wanted)) {
      single();
      first.model = wanted;
      first.messages = [];
    }
    if (place.query.adapter && place.query.adapter !== first.settings.adapter) {
      single();
      first.settings.adapter = place.query.adapter;
    }
    changed();
  }, [wanted, place.query.adapter]);

  const model = list.find((one) => one.id === first.model);
  const task = documents ? "documents" : kind(model);
  const deciding = task === "chat" && place.query.run === "decisions";
  const choose = (lane) => (id) => {
    lane.controller?.abort();
    if (id === DOCUMENTS.value) {
      setQuery({ model: id });
      return;
    }
    if (kind(list.find((one) => one.id === id)) !== "chat") single();
    lane.model = id;
    lane.settings.adapter = "";
    if (lane === first) setQuery({ model: id });
    changed();
  };
  const chats = list.filter((one) => kind(one) === "chat");
  const two = state.lanes.length === 2;
  return html`
    <header class="page-head"><div><h1>Playground</h1></div><div class="row">
      ${!two && html`<${Select} label="Model" hideLabel value=${documents ? DOCUMENTS.value : first.model} options=${[...asOptions(list), DOCUMENTS]} onInput=${choose(first)} />`}
      ${task === "chat" && !two && html`<${Segments} label="What to run" value=${deciding ? "decisions" : ""} onInput=${(value) => setQuery({ run: value })}
        options=${[{ value: "", label: "Chat" }, { value: "decisions", label: "Decisions" }]} />`}
      ${task === "chat" && !deciding && html`
        <${Button} icon="compare" aria-pressed=${two ? "true" : "false"} onClick=${() => { (two ? single : compare)(); changed(); }}>${two ? "One model" : "Compare"}<//>
        <${Button} icon="trash" disabled=${busy() || !state.lanes.some((lane) => lane.messages.length)} onClick=${() => { clear(); changed(); }}>Clear<//>`}
    </div></header>
    ${task === "chat" && !deciding
      ? html`<${Chat} list=${chats} choose=${choose} changed=${changed} />`
      : html`<${TaskPage} key=${`${task} ${first.model}`} load=${FORMS[deciding ? "decisions" : task]} model=${model} />`}`;
}

function TaskPage({ load, model }) {
  const page = useResource(() => load(), []);
  return html`<${Loaded} of=${page} tall>${(module) => html`<${module.default} model=${model} />`}<//>`;
}
