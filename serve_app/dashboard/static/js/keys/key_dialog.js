// The form of a key.
import { get, ofAccount, post, put } from "../core/api.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { Button, Check, Select, TextField } from "../ui/controls.js";
import { Dialog } from "../ui/dialog.js";
import { Notice } from "../ui/states.js";
import { asForm, fromForm, LimitFields } from "./limits.js";

const SCOPES = [
  ["inference", "Run models"],
  ["read", "See status, usage and requests"],
  ["admin", "Manage the account, its keys and members"],
];

/** @param {{account: Object, existing: Object|null, onClose: () => void, onDone: (made: Object) => void}} props */
export function KeyDialog({ account, existing, onClose, onDone }) {
  const [form, setForm] = useState({
    name: existing?.name ?? "", scopes: existing?.scopes ?? ["inference", "read"], expires: existing?.expires_on?.slice(0, 10) ?? "",
    priority: existing?.priority ?? "realtime", member: "",
  });
  const [limits, setLimits] = useState(asForm(existing?.limits));
  const [error, setError] = useState("");
  const members = useResource((signal) => get(ofAccount("/members", account.id), {}, { signal }), [], { skip: Boolean(existing) });
  const set = (name) => (value) => setForm((old) => ({ ...old, [name]: value }));
  const scope = (name) => (on) => set("scopes")(on ? [...form.scopes, name] : form.scopes.filter((one) => one !== name));
  const save = async () => {
    const asked = {
      name: form.name.trim(), scopes: form.scopes, priority: form.priority, limits: fromForm(limits),
      expires_on: form.expires ? `${form.expires}T00:00:00Z` : null,
    };
    if (form.member) asked.member = form.member;
    setError("");
    try {
      onDone(existing ? await put(ofAccount(`/tokens/${existing.id}`, account.id), asked) : await post(ofAccount("/tokens", account.id), asked));
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<${Dialog} wide title=${existing ? `Change ${existing.name || existing.id}` : "New key"} onClose=${onClose}
    foot=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} main disabled=${!form.scopes.length} onClick=${save}>${existing ? "Save" : "Make the key"}<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    <${TextField} label="Name" value=${form.name} onInput=${set("name")} placeholder="What uses it, such as ci" maxlength="100" />
    <fieldset class="stack-s"><legend class="label">Scopes</legend>${SCOPES.map(([name, about]) => html`<${Check} key=${name} label=${name} hint=${about} checked=${form.scopes.includes(name)} onInput=${scope(name)} />`)}</fieldset>
    <div class="form-grid">
      <${TextField} label="Expires" type="date" value=${form.expires} onInput=${set("expires")} hint="At 00:00 UTC; empty for never" />
      <${Select} label="Priority" value=${form.priority} onInput=${set("priority")} options=${[{ value: "realtime", label: "Real time" }, { value: "batch", label: "Can wait" }]} />
      ${members.data?.length > 0 && html`<${Select} label="Member" value=${form.member} onInput=${set("member")} options=${[{ value: "", label: "Nobody's own" }, ...members.data.map((one) => ({ value: one.id, label: one.email ?? one.id }))]} />`}
    </div>
    <${LimitFields} form=${limits} setForm=${setLimits} />
  <//>`;
}
