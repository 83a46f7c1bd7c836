// Requests to the API. Every page goes through here; there are no routes of the page's own but the session's.
import { leave, session, token } from "./session.js";

/** An answer that is an error, with what the API says of it. */
export class ApiError extends Error {
  /** @param {number} status @param {number|string|null} code @param {string} message @param {string} id */
  constructor(status, code, message, id = "") {
    super(message);
    this.status = status;
    this.code = code;
    this.id = id;
  }
}

/** The path of something below the account's AI routes. */
export const ai = (path, account = session()?.account) => `/client/v4/accounts/${encodeURIComponent(account)}/ai${path}`;
export const ofAccount = (path, account = session()?.account) => `/client/v4/accounts/${encodeURIComponent(account)}${path}`;

/**
 * Sends a request and gives the response if it is good.
 * @param {string} method
 * @param {string} path
 * @param {{query?: Object, body?: any, headers?: Object, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>}
 */
export async function send(method, path, { query, body, headers = {}, signal } = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== undefined && value !== null && value !== "") search.set(name, String(value));
  }
  const raw = body instanceof FormData || body instanceof Blob || typeof body === "string" || body === undefined;
  const url = search.size ? `${path}?${search}` : path;
  let answer;
  try {
    answer = await fetch(url, {
      method,
      signal,
      body: raw ? body : JSON.stringify(body),
      headers: { "x-csrf-token": token(), ...(raw ? {} : { "content-type": "application/json" }), ...headers },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, null, "The server cannot be reached. Check that it is running; this page tries again by itself.");
  }
  if (answer.ok) return answer;
  throw await failed(answer);
}

async function failed(answer) {
  const text = await answer.text();
  let told = {};
  try {
    told = JSON.parse(text);
  } catch {
    // An answer that is not of the API, such as a proxy's page.
  }
  const first = told.errors?.[0] ?? told.error ?? {};
  const message = first.message ?? (typeof told.error === "string" ? told.error : "") ?? "";
  const error = new ApiError(answer.status, first.code ?? null, message || `The server answered ${answer.status}.`, answer.headers.get("cf-ray") ?? "");
  if (answer.status === 401) leave("Your session has ended. Sign in again.");
  return error;
}

/** The JSON of an answer, out of its envelope; `whole` leaves the envelope on. */
export async function get(path, query, { signal, whole = false } = {}) {
  return unwrap(await send("GET", path, { query, signal }), whole);
}

export async function post(path, body, options = {}) {
  return unwrap(await send(options.method ?? "POST", path, { body, ...options }), options.whole);
}

export const put = (path, body, options = {}) => post(path, body, { ...options, method: "PUT" });
export const patch = (path, body, options = {}) => post(path, body, { ...options, method: "PATCH" });
export const remove = (path, options = {}) => post(path, undefined, { ...options, method: "DELETE" });

async function unwrap(answer, whole) {
  const text = await answer.text();
  if (!text) return null;
  const told = JSON.parse(text);
  const enveloped = told && typeof told === "object" && "result" in told && ("success" in told || "result_info" in told || Object.keys(told).length === 1);
  return enveloped && !whole ? told.result : told;
}

/** Saves an answer as a file. */
export async function download(path, query, name) {
  const blob = await (await send("GET", path, { query })).blob();
  saveAs(blob, name);
}

export function saveAs(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
