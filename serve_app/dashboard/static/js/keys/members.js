// Members of an account: people, by e-mail address, with what their keys may do at most.
import { get, ofAccount, post, remove } from "../core/api.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Button, Check, TextField } from "../ui/controls.js";
import { confirm, Dialog } from "../ui/dialog.js";
import { Badge, Card, Empty, Loaded, Notice } from "../ui/states.js";
import { Table } from "../ui/table.js";
import { toast } from "../ui/toast.js";

const roleName = (role) => (typeof role === "string" ? role : role.name ?? role.id);
const address = (member) => member.email ?? member.user?.email ?? member.id;

export function Members({ account }) {
  const members = useResource((signal) => get(ofAccount("/members", account.id), { per_page: 1000 }, { signal }), []);
  const [adding, setAdding] = useState(false);
  const end = async (member) => {
    const sure = await confirm({ title: `Remove ${address(member)}?`, text: "All keys of this member end at once.", action: "Remove member" });
    if (!sure) return;
    await remove(ofAccount(`/members/${member.id}`, account.id));
    toast("The member is removed");
    await members.reload();
  };
  const columns = [
    { key: "email", label: "E-mail", by: address, cell: (one) => html`<span class="wrap">${address(one)}</span>` },
    { key: "roles", label: "Roles", cell: (one) => html`<span class="row">${one.roles.map((role) => html`<${Badge} key=${roleName(role)}>${roleName(role)}<//>`)}</span>` },
    { key: "id", label: "Id", cell: (one) => html`<span class="mono muted">${one.id}</span>` },
    { key: "actions", label: "", cell: (one) => html`<${Button} small bad icon="trash" label=${`Remove ${address(one)}`} onClick=${() => end(one)} />` },
  ];
  return html`<${Card} title="Members" note="No key of a member may do more than the member's roles." bare action=${html`<${Button} icon="plus" onClick=${() => setAdding(true)}>Add a member<//>`}>
    <div class="table-top"><${Loaded} of=${members}>${(list) => (list.length ? html`<${Table} label="Members" columns=${columns} rows=${list} />` : html`<${Empty} icon="keys" title="No members yet">Keys can belong to a person, and end with the membership.<//>`)}<//></div>
    ${adding && html`<${AddMember} account=${account} onClose=${() => setAdding(false)} onDone=${() => { setAdding(false); members.reload(); }} />`}<//>`;
}

function AddMember({ account, onClose, onDone }) {
  const [email, setEmail] = useState("");
  const [roles, setRoles] = useState(["inference", "read"]);
  const [error, setError] = useState("");
  const save = async () => {
    try {
      await post(ofAccount("/members", account.id), { email: email.trim(), roles });
      onDone();
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<${Dialog} title="Add a member" onClose=${onClose} foot=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} main disabled=${!email.trim() || !roles.length} onClick=${save}>Add<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    <${TextField} label="E-mail" type="email" value=${email} onInput=${setEmail} placeholder="ann@example.com" />
    <fieldset class="stack-s"><legend class="label">Roles</legend>${["inference", "read", "admin"].map((one) => html`<${Check} key=${one} label=${one} checked=${roles.includes(one)}
      onInput=${(on) => setRoles(on ? [...roles, one] : roles.filter((other) => other !== one))} />`)}</fieldset><//>`;
}
