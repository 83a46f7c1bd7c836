// The frame around the pages: sidebar, theme, who is signed in. A page's code is fetched when it is opened.
import { can, leave, session, signOut, token } from "./core/session.js";
import { Component, html, useEffect, useRef, useState } from "./core/lib.js";
import { link, usePlace } from "./core/router.js";
import { setTheme, theme } from "./core/theme.js";
import { Button } from "./ui/controls.js";
import { Icon, Mark } from "./ui/icons.js";
import { Empty, Failed, Skeleton } from "./ui/states.js";

/** Pages by address. `scope`: what a key needs to see one; any of several will do. */
const PAGES = [
  { name: "overview", title: "Overview", scope: ["read"], load: () => import("./pages/overview.js") },
  { name: "playground", title: "Playground", scope: ["inference"], load: () => import("./pages/playground.js") },
  { name: "models", title: "Models", scope: ["inference", "read"], load: () => import("./pages/models.js") },
  { group: "Activity" },
  { name: "usage", title: "Usage", scope: ["read"], load: () => import("./pages/usage.js") },
  { name: "requests", title: "Requests", scope: ["read"], load: () => import("./pages/requests.js") },
  { name: "batches", title: "Batches", scope: ["inference", "read"], load: () => import("./pages/batches.js") },
  { name: "queues", title: "Queues", scope: ["inference", "read"], load: () => import("./pages/queues.js") },
  { group: "Manage" },
  { name: "adapters", title: "Adapters", scope: ["inference", "read"], load: () => import("./pages/adapters.js") },
  { name: "keys", title: "Keys and budgets", icon: "keys", scope: ["admin"], load: () => import("./pages/keys.js") },
  { name: "webhooks", title: "Webhooks", scope: ["admin"], load: () => import("./pages/webhooks.js") },
  { name: "cluster", title: "Cluster", scope: ["read"], load: () => import("./pages/cluster.js") },
  { name: "settings", title: "Settings", scope: [], load: () => import("./pages/settings.js") },
];

const allowed = (page) => !page.scope?.length || page.scope.some(can);

export function Shell({ who }) {
  const place = usePlace();
  const [open, setOpen] = useState(false);
  const page = PAGES.find((one) => one.name === place.page);
  const first = PAGES.find((one) => one.name && allowed(one));
  const main = useRef(null);
  const before = useRef(place.page);

  useEffect(() => { if (!page) location.replace(link(first.name)); }, [page]);
  useEffect(() => {
    if (page) document.title = `${place.rest || page.title} · serve-app`;
    setOpen(false);
    // Whoever goes by keyboard or screen reader is at the new page's beginning.
    if (before.current && before.current !== place.page) main.current?.focus();
    before.current = place.page;
  }, [place.page, place.rest]);
  useEffect(() => {
    const timer = setInterval(watch, 5000);
    return () => clearInterval(timer);
  }, []);

  return html`<div class=${open ? "frame menu-open" : "frame"} onKeyDown=${(event) => event.key === "Escape" && setOpen(false)}>
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to content</a>
    <header class="topbar">
      <${Button} quiet icon="menu" label="Menu" aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(true)} />
      <a class="brand" href=${link(first.name)}><${Mark} />serve-app</a>
    </header>
    <button class="scrim" aria-label="Close menu" tabindex="-1" onClick=${() => setOpen(false)}></button>
    <${Sidebar} who=${who} current=${place.page} home=${first.name} />
    <main id="main" class="page" tabindex="-1" ref=${main}>
      ${page && (allowed(page)
        ? html`<${Boundary} key=${page.name}><${Page} page=${page} place=${place} /><//>`
        : html`<${Empty} icon="keys" title="Not for this key">This page needs a key with the scope ${page.scope.join(" or ")}. Sign in with another one.<//>`)}
    </main>
  </div>`;
}

function Sidebar({ who, current, home }) {
  const name = who.account_name || who.account;
  return html`<div class="sidebar">
    <a class="brand" href=${link(home)}><${Mark} />serve-app</a>
    <nav class="nav" aria-label="Pages">${PAGES.map((one) => (one.group
      ? html`<span class="nav-group" key=${one.group}>${one.group}</span>`
      : allowed(one) && html`<a key=${one.name} href=${link(one.name)} aria-current=${current === one.name ? "page" : undefined}><${Icon} name=${one.icon ?? one.name} />${one.title}</a>`))}</nav>
    <div class="who">
      <div><div class="who-name" title=${who.account}>${name}</div><div class="hint">${who.operator ? "operator" : who.scopes.join(", ")}</div></div>
      <div class="who-row"><${ThemeButton} /><${Button} quiet small icon="out" onClick=${signOut}>Sign out<//></div>
    </div>
  </div>`;
}

const NEXT = { system: "light", light: "dark", dark: "system" };
const ICONS = { system: "screen", light: "sun", dark: "moon" };

function ThemeButton() {
  const [name, setName] = useState(theme());
  const press = () => {
    setTheme(NEXT[name]);
    setName(NEXT[name]);
  };
  return html`<${Button} quiet small icon=${ICONS[name]} label=${`Theme: ${name}. Change to ${NEXT[name]}`} onClick=${press} />`;
}

/** Fetches a page's module, then shows it. */
function Page({ page, place }) {
  const [loaded, setLoaded] = useState(null);
  const [error, setError] = useState(null);
  const fetchPage = () => {
    setError(null);
    page.load().then((module) => setLoaded(() => module.default), setError);
  };
  useEffect(fetchPage, [page]);
  if (error) return html`<${Failed} error=${{ message: "This page could not be loaded.", status: 0 }} reload=${() => location.reload()} />`;
  return loaded ? html`<${loaded} place=${place} />` : html`<${Skeleton} lines=${4} />`;
}

/** A page that fails shows that; the frame goes on. */
class Boundary extends Component {
  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }

  render({ children }, { error }) {
    if (!error) return children;
    return html`<${Failed} error=${{ message: `This page failed: ${error.message}`, status: 0 }} reload=${() => this.setState({ error: null })} />`;
  }
}

/** Ends the page's session soon after the server has ended it, such as when the key is revoked. */
async function watch() {
  if (document.hidden || !session()) return;
  const answer = await fetch("/dashboard/session", { headers: { "x-csrf-token": token() }, cache: "no-store" }).catch(() => null);
  if (answer?.status === 401) leave("Your session has ended. Sign in again.");
}
