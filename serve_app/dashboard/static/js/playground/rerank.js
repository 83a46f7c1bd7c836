// Reranking: passages sorted by how well they answer a question.
import { count } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { Button, TextArea, TextField } from "../ui/controls.js";
import { Card, Empty, Meter } from "../ui/states.js";
import { Outcome } from "./outcome.js";
import { run } from "./run.js";

const EXAMPLE = "Close a file.\nReturn the square root of x.\nJoin two paths with the separator of the operating system.\nSort a list in place.";

export default function Rerank({ model }) {
  const [query, setQuery] = useState("How is a square root computed?");
  const [text, setText] = useState(EXAMPLE);
  const [done, setDone] = useState(null);
  const passages = text.split("\n").map((one) => one.trim()).filter(Boolean);
  const sort = async () => setDone({ ...(await run(model.id, { query, contexts: passages.map((one) => ({ text: one })) })), passages });
  return html`<div class="grid-2">
    <${Card} title="Question and passages" note=${model.description}><div class="stack">
      <${TextField} label="Question" value=${query} onInput=${setQuery} />
      <${TextArea} label="One passage on each line" rows="8" value=${text} onInput=${setText} />
      <div><${Button} main disabled=${!query.trim() || !passages.length} onClick=${sort}>Sort ${count(passages.length)} passages<//></div>
    </div><//>
    <${Card} title="Best first" note="Scores lie between 0 and 1">
      ${done ? html`<div class="stack"><ol class="ranked">${done.result.response.map((one) => html`<li key=${one.id}>
          <div class="between"><span class="wrap">${done.passages[one.id]}</span><strong class="num">${one.score.toFixed(4)}</strong></div>
          <${Meter} plain share=${one.score} label=${`Score of passage ${one.id + 1}`} /></li>`)}</ol><${Outcome} done=${done} /></div>`
        : html`<${Empty} icon="requests" title="Nothing sorted yet">The passages appear here in the order of their scores.<//>`}<//>
  </div>`;
}
