// The page for those who are not signed in.
import { html, useEffect, useRef, useState } from "./core/lib.js";
import { signIn } from "./core/session.js";
import { Button, Field } from "./ui/controls.js";
import { Mark } from "./ui/icons.js";
import { Notice } from "./ui/states.js";

/** @param {{notice: string, onDone: (session: Object) => void}} props */
export function SignIn({ notice, onDone }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const input = useRef(null);
  useEffect(() => {
    document.title = "Sign in · serve-app";
    input.current.focus();
  }, []);

  const submit = async (event) => {
    event.preventDefault();
    if (!key.trim() || busy) return;
    setBusy(true);
    setError("");
    try {
      onDone(await signIn({ key: key.trim() }));
    } catch (failure) {
      setError(failure.status ? failure.message : "The server cannot be reached. Check that it is running.");
      setBusy(false);
      input.current.select();
    }
  };

  return html`<main class="sign-in"><div class="sign-in-box">
    <h1 class="brand"><${Mark} />serve-app</h1>
    ${notice && html`<${Notice} role="status">${notice}<//>`}
    <form class="card card-body stack" onSubmit=${submit}>
      <${Field} label="API key" error=${error}>${(tie) => html`<input ref=${input} class="input mono" type="password" name="key" autocomplete="current-password"
        required spellcheck="false" ...${tie} value=${key} onInput=${(event) => setKey(event.currentTarget.value)} />`}<//>
      <${Button} main type="submit" disabled=${busy}>${busy ? "Signing in …" : "Sign in"}<//>
      <p class="hint">The key was printed when the server started. To sign in without typing it, run <code>serve-app dashboard</code> on
      the server's machine and open the link that it prints.</p>
    </form>
    <p class="hint">The key is sent once and not kept in this browser. A session ends after an hour without use.</p>
  </div></main>`;
}
