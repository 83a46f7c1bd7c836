// Keys and budgets: of one account; the operator chooses which, and makes new ones.
import { get } from "../core/api.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { setQuery } from "../core/router.js";
import { session } from "../core/session.js";
import { AccountsDialog } from "../keys/account_dialog.js";
import { Audit } from "../keys/audit.js";
import { Budgets } from "../keys/budgets.js";
import { Keys } from "../keys/key_list.js";
import { Members } from "../keys/members.js";
import { Button, Select, Tabs } from "../ui/controls.js";
import { Loaded, PageHead } from "../ui/states.js";

const TABS = [
  { value: "keys", label: "Keys", view: Keys },
  { value: "budgets", label: "Budgets", view: Budgets },
  { value: "members", label: "Members", view: Members },
  { value: "audit", label: "Audit trail", view: Audit },
];

export default function KeysPage({ place }) {
  const who = session();
  const [adding, setAdding] = useState(false);
  const accounts = useResource((signal) => get("/client/v4/accounts", { per_page: 1000 }, { signal }), []);
  const chosen = place.query.account ?? who.account;
  const tab = TABS.find((one) => one.value === place.query.tab) ?? TABS[0];
  return html`
    <${PageHead} title="Keys and budgets" action=${who.operator && html`<${Button} icon="plus" onClick=${() => setAdding(true)}>New account<//>`}>
      Who may use this server, for what, and how much of it.<//>
    <${Loaded} of=${accounts}>${(list) => {
      const account = list.find((one) => one.id === chosen) ?? list[0];
      return html`
        ${list.length > 1 && html`<div class="filters"><${Select} label="Account" value=${account.id} onInput=${(id) => setQuery({ account: id })}
          options=${list.map((one) => ({ value: one.id, label: one.name === one.id ? one.id : `${one.name} (${one.id})` }))} /></div>`}
        <${Tabs} label="Of this account" value=${tab.value} options=${TABS} onInput=${(value) => setQuery({ tab: value })} />
        <${tab.view} key=${`${account.id} ${tab.value}`} account=${account} reload=${accounts.reload} />
        ${adding && html`<${AccountsDialog} onClose=${() => setAdding(false)} onDone=${async (id) => { await accounts.reload(); setQuery({ account: id, tab: "keys" }); }} />`}`;
    }}<//>`;
}
