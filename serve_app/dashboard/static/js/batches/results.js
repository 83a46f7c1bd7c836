// The results of a batch, as far as there are any.
import { ai, send } from "../core/api.js";
import { html } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Code } from "../ui/code.js";
import { Empty, Loaded, Notice } from "../ui/states.js";

const SHOWN_BYTES = 200_000;

/** Shows the first part; the whole is for the button that saves it. */
export function Results({ batch }) {
  const results = useResource(async (signal) => {
    if (!batch.progress.done) return { text: "", cut: false };
    const answer = await send("GET", ai(`/batches/${batch.id}/results`), { signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    let done = false;
    while (!done && text.length < SHOWN_BYTES) {
      const part = await reader.read();
      done = part.done;
      text += part.value ?? "";
    }
    reader.cancel().catch(() => {});
    return { text: done ? text : text.slice(0, text.lastIndexOf("\n")), cut: !done };
  }, [batch.id, batch.progress.done]);
  return html`<${Loaded} of=${results} tall>${({ text, cut }) => html`<div class="stack">
    ${batch.problems.length > 0 && html`<${Notice} kind="bad" title="Problems">${batch.problems.slice(0, 20).map((one, at) => html`<div key=${at}>${typeof one === "string" ? one : one.message ?? JSON.stringify(one)}</div>`)}<//>`}
    ${cut && html`<${Notice}>These are the first results. Save the file to see all.<//>`}
    ${text ? html`<${Code} label="Results" text=${text.split("\n").filter(Boolean).map(pretty).join("\n")} />` : html`<${Empty} icon="batches" title="No results yet">They appear as requests are done.<//>`}</div>`}<//>`;
}

function pretty(line) {
  try {
    return JSON.stringify(JSON.parse(line), null, 1);
  } catch {
    return line;
  }
}
