// Who is signed in. The session is two halves: an HttpOnly cookie, and a token which this origin keeps and sends in a
// header. Neither opens anything without the other. The key itself is sent once and kept nowhere.

const TOKEN = "serve-app.csrf";
const NOTICE = "serve-app.notice";

/**
 * @typedef {Object} Session
 * @property {string} account  id of the account
 * @property {string} account_name
 * @property {string[]} scopes
 * @property {boolean} operator
 * @property {{id: string, name: string}} key
 * @property {number|string} expires
 */

/** @type {Session|null} */
let current = null;
let leaving = false;

export const session = () => current;
export const token = () => localStorage.getItem(TOKEN) ?? "";
export const can = (scope) => Boolean(current?.scopes.includes(scope));

/** Asks the server whether a session is open; null if there is none. */
export async function resume() {
  if (!token()) return null;
  // The page has asked while its modules came.
  const { early } = globalThis;
  delete globalThis.early;
  const answer = await (early?.token === token() ? early.asked : fetch("/dashboard/session", { headers: { "x-csrf-token": token() }, cache: "no-store" }));
  if (!answer.ok) {
    if (answer.status === 401 || answer.status === 403) localStorage.removeItem(TOKEN);
    return null;
  }
  return adopt(await answer.json());
}

/** Opens a session with a key or with a one-time code. @param {{key?: string, code?: string}} proof */
export async function signIn(proof) {
  const answer = await fetch("/dashboard/session", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(proof),
  });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    const wait = Number(answer.headers.get("retry-after"));
    const error = new Error(body.errors?.[0]?.message ?? `The server answered ${answer.status}.`);
    error.status = answer.status;
    if (answer.status === 429 && wait) error.message += ` Try again in ${wait} seconds.`;
    throw error;
  }
  return adopt(body);
}

function adopt(body) {
  const told = body.result ?? body;
  if (told.csrf) localStorage.setItem(TOKEN, told.csrf);
  current = told;
  return told;
}

export async function signOut() {
  await fetch("/dashboard/session", { method: "DELETE", headers: { "x-csrf-token": token() } }).catch(() => {});
  leave("");
}

/** Forgets everything by loading the page anew: no figure or prompt of the last session stays in memory. */
export function leave(notice) {
  if (!current || leaving) return;
  // Until the page is loaded anew its parts may still be drawn, and ask who is signed in.
  leaving = true;
  localStorage.removeItem(TOKEN);
  if (notice) sessionStorage.setItem(NOTICE, notice);
  location.reload();
}

/** What the last page wanted to tell the sign-in page, once. */
export function takeNotice() {
  const notice = sessionStorage.getItem(NOTICE) ?? "";
  sessionStorage.removeItem(NOTICE);
  return notice;
}

// Another tab that signs out takes the token away.
addEventListener("storage", (event) => {
  if (event.key === TOKEN && !event.newValue) leave("You signed out in another tab.");
});
