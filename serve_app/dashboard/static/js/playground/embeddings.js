// Embeddings: how alike texts are, as a map.
import { count } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { Button, TextArea } from "../ui/controls.js";
import { Card, Empty } from "../ui/states.js";
import { Outcome } from "./outcome.js";
import { run } from "./run.js";

const EXAMPLE = "How is a square root computed?\nmath.sqrt returns the square root of x.\nOpen a file and read its lines.\nRead a text file line by line.";

const lines = (text) => text.split("\n").map((one) => one.trim()).filter(Boolean);

/** Cosine of the angle between two vectors. */
export function cosine(one, other) {
  let dot = 0;
  let left = 0;
  let right = 0;
  for (let at = 0; at < one.length; at += 1) {
    dot += one[at] * other[at];
    left += one[at] ** 2;
    right += other[at] ** 2;
  }
  return left && right ? dot / Math.sqrt(left * right) : 0;
}

export default function Embeddings({ model }) {
  const [text, setText] = useState(EXAMPLE);
  const [done, setDone] = useState(null);
  const texts = lines(text);
  const embed = async () => setDone({ ...(await run(model.id, { text: texts })), texts });
  return html`<div class="grid-2">
    <${Card} title="Texts" note=${model.description}><div class="stack">
      <${TextArea} label="One text on each line" rows="8" value=${text} onInput=${setText} />
      <div><${Button} main disabled=${!texts.length || texts.length > 24} onClick=${embed}>Compare ${count(texts.length)} texts<//></div>
      ${texts.length > 24 && html`<p class="hint">The map shows 24 texts at most; the API takes 4,096.</p>`}
    </div><//>
    <${Card} title="Similarity" note=${done && `${count(done.result.shape[1])} dimensions; 1 is the same direction`}>
      ${done ? html`<div class="stack"><${Matrix} done=${done} /><${Outcome} done=${done} /></div>`
        : html`<${Empty} icon="playground" title="No vectors yet">Each pair of texts gets the cosine of its vectors.<//>`}<//>
  </div>`;
}

function Matrix({ done }) {
  const vectors = done.result.data;
  return html`<div class="table-box" tabindex="0" role="region" aria-label="Similarity of each pair"><table class="matrix">
    <thead><tr><th scope="col"><span class="sr-only">Text</span></th>${done.texts.map((_, at) => html`<th scope="col" key=${at}>${at + 1}</th>`)}</tr></thead>
    <tbody>${done.texts.map((text, row) => html`<tr key=${row}><th scope="row" title=${text}>${row + 1}  ${text}</th>
      ${vectors.map((vector, column) => {
        const alike = cosine(vectors[row], vector);
        const strength = Math.round(Math.max(0, Math.min(1, alike)) * 55);
        return html`<td key=${column} style=${{ background: `color-mix(in srgb, var(--accent) ${strength}%, transparent)` }}>${alike.toFixed(2)}</td>`;
      })}</tr>`)}</tbody></table></div>`;
}
