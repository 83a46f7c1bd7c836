// Adapters (fine-tunes): the account's own and the public ones.
import { ai, get, patch, remove } from "../core/api.js";
import { bytes, count, dateTime, shortModel } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { link } from "../core/router.js";
import { can } from "../core/session.js";
import { Upload } from "../adapters/upload.js";
import { Button } from "../ui/controls.js";
import { confirm } from "../ui/dialog.js";
import { Badge, Card, Empty, Loaded, PageHead } from "../ui/states.js";
import { Table } from "../ui/table.js";
import { toast } from "../ui/toast.js";

const KINDS = { ready: "good", failed: "bad", invalid: "bad" };

export default function Adapters() {
  const lists = useResource(async (signal) => {
    const [own, open] = await Promise.all([get(ai("/finetunes"), {}, { signal }), get(ai("/finetunes/public"), {}, { signal })]);
    const mine = new Set(own.map((one) => one.id));
    return { own, open: open.filter((one) => !mine.has(one.id)) };
  }, [], { every: 5 });
  const [adding, setAdding] = useState(false);
  const able = can("inference");
  const end = async (one) => {
    const sure = await confirm({ title: `Delete ${one.name}?`, text: "Its files are deleted. Requests under way go on; later ones that name it are refused.", action: "Delete adapter" });
    if (!sure) return;
    await remove(ai(`/finetunes/${one.id}`));
    toast("The adapter is deleted");
    await lists.reload();
  };
  const publish = async (one) => {
    await patch(ai(`/finetunes/${one.id}`), { public: !one.public });
    toast(one.public ? "Only this account can use it now" : "Every account can use it now");
    await lists.reload();
  };
  const columns = (own) => [
    { key: "name", label: "Name", by: (one) => one.name, cell: (one) => html`<div><strong class="wrap">${one.name}</strong>${one.description && html`<br /><span class="small muted wrap">${one.description}</span>`}</div>` },
    { key: "model", label: "Model", by: (one) => one.model, cell: (one) => html`<a class="wrap" href=${link("models", one.model)}>${shortModel(one.model)}</a>` },
    { key: "status", label: "Status", by: (one) => one.status, cell: (one) => html`<${Badge} dot kind=${KINDS[one.status] ?? "warn"}>${one.status}<//>` },
    { key: "version", label: "Version", right: true, by: (one) => one.version, cell: (one) => one.version },
    { key: "rank", label: "Rank", right: true, by: (one) => one.rank ?? 0, cell: (one) => count(one.rank) },
    { key: "size", label: "Size", right: true, by: (one) => one.size ?? 0, cell: (one) => bytes(one.size) },
    { key: "modified_at", label: "Changed", by: (one) => one.modified_at, cell: (one) => html`<span class="nowrap">${dateTime(one.modified_at)}</span>` },
    { key: "actions", label: "", cell: (one) => html`
      ${one.status === "ready" && able && html`<${Button} small icon="playground" label=${`Try ${one.name}`} href=${link("playground", "", { model: one.model, adapter: one.id })} />`}
      ${own && able && html`<${Button} small onClick=${() => publish(one)}>${one.public ? "Make private" : "Make public"}<//>
        <${Button} small bad icon="trash" label=${`Delete ${one.name}`} onClick=${() => end(one)} />`}` },
  ];
  return html`
    <${PageHead} title="Adapters" action=${able && html`<${Button} main icon="upload" onClick=${() => setAdding(true)}>Upload an adapter<//>`}>
      LoRA fine-tunes that run beside their model; a request names one in its field lora.<//>
    <${Loaded} of=${lists} tall>${({ own, open }) => html`
      <${Card} title="Of this account" bare><div class="table-top">${own.length ? html`<${Table} label="Adapters of this account" columns=${columns(true)} rows=${own} />`
        : html`<${Empty} icon="adapters" title="No adapters yet">Upload the two files of a LoRA adapter in PEFT's format.<//>`}</div><//>
      ${open.length > 0 && html`<${Card} title="Public" note="Every account can use these" bare><div class="table-top"><${Table} label="Public adapters" columns=${columns(false)} rows=${open} /></div><//>`}`}<//>
    ${adding && html`<${Upload} onClose=${() => setAdding(false)} onDone=${() => { setAdding(false); lists.reload(); }} />`}`;
}
