// A new account; only the operator makes one.
import { post } from "../core/api.js";
import { html, useState } from "../core/lib.js";
import { Button, TextField } from "../ui/controls.js";
import { Dialog } from "../ui/dialog.js";
import { Notice } from "../ui/states.js";
import { toast } from "../ui/toast.js";

export function AccountsDialog({ onClose, onDone }) {
  const [name, setName] = useState("");
  const [error, setError] = useState("");
  const save = async () => {
    try {
      const made = await post("/client/v4/accounts", { name: name.trim() });
      toast(`Account ${made.id} is made`);
      onClose();
      onDone(made.id);
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<${Dialog} title="New account" onClose=${onClose} foot=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} main disabled=${!name.trim()} onClick=${save}>Make the account<//>`}>
    ${error && html`<${Notice} kind="bad" role="alert">${error}<//>`}
    <${TextField} label="Name" value=${name} onInput=${setName} placeholder="team-a" hint="Its id is made from it; keys and limits come next" /><//>`;
}
