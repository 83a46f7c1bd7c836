// The keys of an account: made, changed, rolled, ended.
import { get, ofAccount, put, remove } from "../core/api.js";
import { ago, date, moment } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { session } from "../core/session.js";
import { Code } from "../ui/code.js";
import { Button } from "../ui/controls.js";
import { confirm, Dialog } from "../ui/dialog.js";
import { Badge, Card, Empty, Loaded, Notice } from "../ui/states.js";
import { Table } from "../ui/table.js";
import { toast, toastError } from "../ui/toast.js";
import { KeyDialog } from "./key_dialog.js";
import { told } from "./limits.js";

export function Keys({ account }) {
  const keys = useResource((signal) => get(ofAccount("/tokens", account.id), { per_page: 1000 }, { signal }), []);
  const [edited, setEdited] = useState(null);
  const [shown, setShown] = useState(null);
  const path = (key, rest = "") => ofAccount(`/tokens/${key.id}${rest}`, account.id);
  const act = async (work, text) => {
    try {
      await work();
      if (text) toast(text);
    } catch (error) {
      toastError(error);
    }
    await keys.reload();
  };
  const roll = async (key) => {
    const sure = await confirm({ title: `Roll ${named(key)}?`, text: "It gets another value, shown once. The old value is refused within a second, and sessions opened with it end.", action: "Roll key" });
    if (sure) await act(async () => setShown({ value: await put(path(key, "/value"), {}), name: named(key) }));
  };
  const end = async (key) => {
    const mine = key.id === session().key?.id;
    const sure = await confirm({ title: `Revoke ${named(key)}?`, text: mine ? "This is the key of your session: you are signed out at once." : "Clients that use it are refused within a second, and its sessions end. This cannot be undone.", action: "Revoke key" });
    if (sure) await act(() => remove(path(key)), `${named(key)} is revoked`);
  };
  const toggle = (key) => act(() => put(path(key), { status: key.status === "disabled" ? "active" : "disabled" }), key.status === "disabled" ? "Enabled" : "Disabled");
  const columns = [
    { key: "name", label: "Name", by: (key) => key.name ?? "", cell: (key) => html`<div><strong class="wrap">${named(key)}</strong> ${key.id === session().key?.id && html`<${Badge} kind="accent">this session<//>`}<br /><span class="mono muted">${key.id}</span></div>` },
    { key: "scopes", label: "Scopes", cell: (key) => html`<span class="row">${key.scopes.map((one) => html`<${Badge} key=${one}>${one}<//>`)}</span>` },
    { key: "status", label: "Status", by: (key) => key.status, cell: (key) => html`<${Badge} dot kind=${key.status === "active" ? "good" : "warn"}>${key.status}<//>` },
    { key: "limits", label: "Limits", cell: (key) => html`<span class="small muted">${told(key.limits).join(", ") || "none"}</span>` },
    { key: "expires_on", label: "Expires", by: (key) => key.expires_on ?? "9", cell: (key) => html`<span class="nowrap">${key.expires_on ? date(key.expires_on) : "never"}</span>` },
    { key: "last_used_on", label: "Last used", by: (key) => (key.last_used_on ? moment(key.last_used_on).getTime() : 0), cell: (key) => html`<span class="nowrap">${ago(key.last_used_on)}</span>` },
    { key: "actions", label: "", cell: (key) => html`
      <${Button} small icon="edit" label=${`Change ${named(key)}`} onClick=${() => setEdited(key)} />
      <${Button} small icon="refresh" label=${`Roll ${named(key)}`} onClick=${() => roll(key)} />
      <${Button} small icon=${key.status === "disabled" ? "play" : "stop"} label=${`${key.status === "disabled" ? "Enable" : "Disable"} ${named(key)}`} onClick=${() => toggle(key)} />
      <${Button} small bad icon="trash" label=${`Revoke ${named(key)}`} onClick=${() => end(key)} />` },
  ];
  return html`
    <${Card} title="API keys" note="Kept as hashes: a value is shown once, when it is made." bare action=${html`<${Button} main icon="plus" onClick=${() => setEdited({})}>New key<//>`}>
      <div class="table-top"><${Loaded} of=${keys}>${(list) => (list.length
        ? html`<${Table} label="API keys" columns=${columns} rows=${list} />`
        : html`<${Empty} icon="keys" title="No further keys">${account.id === session().account ? "The key of the settings works without being listed here." : "This account has no key yet."}<//>`)}<//></div><//>
    ${edited && html`<${KeyDialog} account=${account} existing=${edited.id ? edited : null} onClose=${() => setEdited(null)}
      onDone=${async (made) => { setEdited(null); if (made?.value) setShown({ value: made.value, name: named(made) }); else toast("Changed"); await keys.reload(); }} />`}
    ${shown && html`<${Dialog} title="Copy this key now" onClose=${() => setShown(null)} foot=${html`<${Button} main onClick=${() => setShown(null)}>Done<//>`}>
      <${Notice} kind="warn">The value of ${shown.name} is shown this once; nobody can read it later.<//><${Code} label="Key" text=${shown.value} /><//>`}`;
}

export const named = (key) => key.name || key.id;
