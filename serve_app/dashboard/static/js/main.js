// Begins: opens the session that there is, or by the one-time code of the address, or shows the sign-in page.
import { html, render } from "./core/lib.js";
import { resume, signIn, takeNotice } from "./core/session.js";
import { Shell } from "./shell.js";
import { SignIn } from "./sign_in.js";
import { Toasts } from "./ui/toast.js";

const place = document.getElementById("app");

async function begin() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  let notice = takeNotice();
  let who = null;
  if (code) {
    // The code opens one session, once; it leaves the address at once, so that nobody copies it from there.
    history.replaceState(null, "", `${location.pathname}#/playground`);
    who = await signIn({ code }).catch((error) => { notice = error.message; });
  }
  who ??= await resume().catch(() => { notice ||= "The server cannot be reached. Check that it is running."; });
  place.replaceChildren();
  show(who, notice);
}

function show(who, notice) {
  const page = who ? html`<${Shell} who=${who} />` : html`<${SignIn} notice=${notice} onDone=${(told) => show(told, "")} />`;
  render(html`${page}<${Toasts} />`, place);
}

begin();
