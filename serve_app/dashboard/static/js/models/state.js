// How models stand, from the server's health; and what they can do, in words.
import { get } from "../core/api.js";
import { yes } from "../core/catalog.js";
import { count } from "../core/format.js";

const LABELS = {
  running: ["good", "ready"], starting: ["warn", "starting"], deploy_failed: ["bad", "failed"], unhealthy: ["bad", "unhealthy"], deleting: ["", "stopping"],
};
const STARTING = ["running", "waiting", "not_started", "deploying"];

/** @returns {Promise<Object<string, {kind: string, label: string, ready: boolean}>>} by model */
export async function states(signal) {
  const health = await get("/health", {}, { signal, whole: true }).catch((error) => (error.status === 503 ? {} : Promise.reject(error)));
  return Object.fromEntries(Object.entries(health.models ?? {}).map(([id, told]) => {
    const state = told.ready ? "running" : STARTING.includes(told.state) ? "starting" : told.state;
    const [kind, label] = LABELS[state] ?? ["warn", String(told.state ?? "not ready")];
    return [id, { kind, label, ready: Boolean(told.ready), state }];
  }));
}

const MARKS = [
  ["context_window", (value) => `${count(Number(value))} tokens context`],
  ["max_input_tokens", (value) => `${count(Number(value))} tokens input`],
  ["output_dimensions", (value) => `${count(Number(value))} dimensions`],
  ["function_calling", () => "tools"],
  ["reasoning", () => "reasoning"],
  ["vision", () => "vision"],
  ["hearing", () => "hearing"],
  ["lora", () => "adapters"],
  ["async_queue", () => "batches"],
  ["beta", () => "beta"],
];

/** Short words for what a model can do. */
export const marks = (model) => MARKS.filter(([name]) => name in model.properties && model.properties[name] !== "false")
  .filter(([name, word]) => word.length || yes(model.properties[name])).map(([name, word]) => word(model.properties[name]));
