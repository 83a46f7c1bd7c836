// Limits of an account, and how much of its budgets is spent: sums of the ledger, as the page Usage has them.
import { ai, get, ofAccount, put } from "../core/api.js";
import { money, neurons, percent } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { session } from "../core/session.js";
import { Button, Select, TextField } from "../ui/controls.js";
import { Card, Figure, Loaded, Meter } from "../ui/states.js";
import { toast } from "../ui/toast.js";
import { add, costs } from "../usage/sums.js";
import { asForm, fromForm, LimitFields } from "./limits.js";

const today = () => new Date().toISOString().slice(0, 10);
const month = () => `${today().slice(0, 8)}01`;

/**
 * What an account used since midnight and since the month's first day (UTC).
 * @returns {Promise<{neurons: number, units: Object<string, number>, today: Object[], money: Object[]}>} `today`, `money`: the money of the day and of the month
 */
export async function spent(account, signal) {
  const query = (since) => ({ since, interval: "none", ...(account.id === session().account ? {} : { account: account.id }) });
  const [day, all] = await Promise.all([get(ai("/usage"), query(today()), { signal }), get(ai("/usage"), query(month()), { signal })]);
  const { neurons: used, units } = add(day);
  return { neurons: used, units, today: costs(day), money: costs(all) };
}

export function Budgets({ account, reload }) {
  const used = useResource((signal) => spent(account, signal), [account.id], { every: 15 });
  return html`<div class="stack">
    <${Loaded} of=${used}>${(told) => html`<div class="grid-figures">
      <${Budget} label="Neurons today" used=${told.neurons} of=${account.limits?.neurons_per_day} show=${neurons} />
      ${(told.money.length ? told.money : [{ amount: "0", currency: "USD" }]).map((cost) => html`<${Budget} key=${cost.currency} label="Money this month" used=${Number(cost.amount)} of=${account.limits?.money_per_month}
        show=${(value) => money(typeof value === "number" ? cost : { amount: value, currency: cost.currency })} />`)}
    </div>`}<//>
    <${LimitsForm} key=${JSON.stringify(account.limits)} account=${account} reload=${reload} />
  </div>`;
}

export function Budget({ label, used, of, show }) {
  const most = of === undefined || of === null ? null : Number(of);
  return html`<${Figure} label=${label} value=${show(used)} note=${most === null ? "no budget is set" : html`<${Meter} share=${most ? used / most : 1} label=${`${label}, share of the budget`} />
    ${percent(most ? used / most : 1, 1)} of ${show(String(of))}`} />`;
}

function LimitsForm({ account, reload }) {
  const operator = session().operator;
  const [form, setForm] = useState(asForm(account.limits));
  const [weight, setWeight] = useState(String(account.weight ?? 1));
  const [plan, setPlan] = useState(account.limits?.plan ?? "");
  const save = async () => {
    await put(ofAccount("", account.id), { weight: Number(weight), limits: { ...fromForm(form), plan: plan || null } });
    toast("Limits are changed; they hold within a second");
    await reload();
  };
  if (!operator) return html`<p class="hint">The operator of this server sets the limits of accounts; you can limit each key.</p>`;
  return html`<${Card} title="Limits of the account" note="They hold together with those of each key, over all gateways.">
    <form class="stack" onSubmit=${(event) => event.preventDefault()}>
      <${LimitFields} form=${form} setForm=${setForm} />
      <div class="form-grid">
        <${TextField} label="Weight" type="number" min="0.01" step="any" value=${weight} onInput=${setWeight} hint="Share where accounts wait: 2 gets twice that of 1" />
        <${Select} label="Plan" value=${plan} onInput=${setPlan} options=${[{ value: "", label: "As the settings say" }, "free", "paid"]} />
      </div>
      <div><${Button} main onClick=${save}>Save limits<//></div>
    </form><//>`;
}
