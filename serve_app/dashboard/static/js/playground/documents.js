// Documents as Markdown: files in, text out, by no model.
import { ai, get, post, saveAs } from "../core/api.js";
import { bytes, count } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Code } from "../ui/code.js";
import { Button } from "../ui/controls.js";
import { Drop } from "../ui/drop.js";
import { Card, Empty, Loaded, Notice } from "../ui/states.js";

const MOST = 20;

export default function DocumentsForm() {
  const known = useResource((signal) => get(ai("/tomarkdown/supported"), {}, { signal }), []);
  const [files, setFiles] = useState([]);
  const [done, setDone] = useState(null);
  const convert = async () => {
    const body = new FormData();
    for (const file of files) body.append("files", file, file.name);
    setDone(await post(ai("/tomarkdown"), body));
  };
  return html`<${Loaded} of=${known} tall>${(kinds) => html`<div class="grid-2">
    <${Card} title="Documents" note="Their text as Markdown, as models read it best. It asks no model and costs nothing."><div class="stack">
      ${!kinds.length && html`<${Notice} kind="warn" title="This server converts no documents yet.">Its operator installs what does: <code>pip install "serve-app[documents]"</code>, then starts it anew.<//>`}
      <${Drop} multiple label=${`Up to ${MOST} files`} hint=${kinds.map((one) => one.extension.replace(".", "").toUpperCase()).join(", ")} accept=${kinds.map((one) => one.extension).join(",")}
        onFiles=${(list) => setFiles((old) => [...old, ...list].slice(0, MOST))} />
      ${files.length > 0 && html`<ul class="stack-s" aria-label="Chosen files">${files.map((one, at) => html`<li key=${at} class="between"><span class="wrap">${one.name}, ${bytes(one.size)}</span>
        <${Button} small quiet icon="close" label=${`Leave out ${one.name}`} onClick=${() => setFiles(files.filter((other) => other !== one))} /></li>`)}</ul>`}
      <div><${Button} main disabled=${!files.length} onClick=${convert}>Convert<//></div></div><//>
    <${Card} title="Markdown">${done
      ? html`<div class="stack" role="region" aria-label="Answer">${done.map((one) => html`<${Converted} key=${one.id} of=${one} />`)}</div>`
      : html`<${Empty} icon="file" title="Nothing converted yet">The text of each file appears here.<//>`}<//>
  </div>`}<//>`;
}

function Converted({ of }) {
  if (of.format === "error") return html`<${Notice} kind="bad" role="alert" title=${of.name}>${of.error}<//>`;
  const save = () => saveAs(new Blob([of.data], { type: "text/markdown" }), `${of.name.replace(/\.[^.]*$/, "")}.md`);
  return html`<section class="stack-s"><div class="between"><div><h3>${of.name}</h3><p class="hint">${of.mimeType}, about ${count(of.tokens)} tokens</p></div><${Button} small icon="download" onClick=${save}>Save<//></div>
    <${Code} label=${`Text of ${of.name}`} text=${of.data} /></section>`;
}
