// Settings: who is signed in, how the page looks, and where clients connect.
import { get } from "../core/api.js";
import { dateTime } from "../core/format.js";
import { html, useState } from "../core/lib.js";
import { useResource } from "../core/resource.js";
import { session, signOut } from "../core/session.js";
import { setTheme, theme } from "../core/theme.js";
import { CopyButton } from "../ui/code.js";
import { Button, Segments } from "../ui/controls.js";
import { Badge, Card, Loaded, PageHead } from "../ui/states.js";

export default function Settings() {
  const who = session();
  const base = `${location.origin}/client/v4/accounts/${who.account}/ai`;
  return html`
    <${PageHead} title="Settings" />
    <${Card} title="Session" action=${html`<${Button} icon="out" onClick=${signOut}>Sign out<//>`}>
      <dl class="facts">
        <dt>Account</dt><dd>${who.account_name || who.account} <span class="muted mono">${who.account}</span></dd>
        <dt>Key</dt><dd>${who.key?.name || "unnamed"} <span class="muted mono">${who.key?.id}</span></dd>
        <dt>Scopes</dt><dd class="row">${who.scopes.map((one) => html`<${Badge} key=${one}>${one}<//>`)}${who.operator && html`<${Badge} kind="accent">operator<//>`}</dd>
        <dt>Ends</dt><dd>${dateTime(who.expires)} unless used before; at the latest twelve hours after sign-in, and at once when the key is revoked</dd>
      </dl><//>
    <${Card} title="Appearance"><${Theme} /><//>
    <${Card} title="Connect" note="Clients send a key as Authorization: Bearer.">
      <dl class="facts">
        <dt>Workers AI</dt><dd><${Address} text=${base} /></dd>
        <dt>OpenAI</dt><dd><${Address} text=${`${location.origin}/v1`} /></dd>
        <dt>Anthropic, Ollama</dt><dd><${Address} text=${location.origin} /></dd>
        <dt>Account id</dt><dd><${Address} text=${who.account} /></dd>
        <dt>Reference</dt><dd><a href="/docs">API reference</a> · <a href="/openapi.json">openapi.json</a></dd>
      </dl><//>
    <${Server} />`;
}

const Address = ({ text }) => html`<span class="row"><code class="wrap">${text}</code><${CopyButton} text=${text} label=${`Copy ${text}`} quiet /></span>`;

function Theme() {
  const [name, setName] = useState(theme());
  const choose = (value) => {
    setTheme(value);
    setName(value);
  };
  return html`<${Segments} label="Theme" value=${name} onInput=${choose}
    options=${[{ value: "system", label: "As the system" }, { value: "light", label: "Light" }, { value: "dark", label: "Dark" }]} />`;
}

function Server() {
  const server = useResource(async (signal) => ({ version: await get("/version", {}, { signal, whole: true }), health: await get("/health", {}, { signal, whole: true }).catch((error) => ({ status: error.message })) }), []);
  return html`<${Card} title="Server"><${Loaded} of=${server}>${({ version, health }) => html`<dl class="facts">
    <dt>Version</dt><dd>${typeof version === "string" ? version : version.version}</dd>
    <dt>Health</dt><dd><${Badge} dot kind=${health.status === "ready" ? "good" : "warn"}>${health.status}<//></dd>
    <dt>Store</dt><dd>${health.store?.status ?? "–"}</dd></dl>`}<//><//>`;
}
