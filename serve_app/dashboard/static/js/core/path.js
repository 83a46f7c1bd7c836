// The path of a request (GET /v1/requests/{id}) as spans of time.
import { get } from "./api.js";

const PATIENCE = 8;

/**
 * The path of a request that has just ended. The gateway that had it knows it at once and others within a second; what the
 * decode worker tells of it comes last.
 */
export async function pathOf(id, signal) {
  for (let tries = 0; ; tries += 1) {
    try {
      const path = await get(`/v1/requests/${encodeURIComponent(id)}`, {}, { signal });
      const whole = path.status !== "running" && (!named(path, "routed") || named(path, "decoded"));
      if (whole || tries > PATIENCE) return path;
    } catch (error) {
      if (error.status !== 404 || tries > PATIENCE) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
}

const named = (path, name) => path.events.find((one) => one.event === name);

/**
 * Spans in milliseconds since the request came, in the order of their beginning.
 * @returns {{name: string, from: number, to: number, series: number, note: string}[]}
 */
export function spans(path) {
  const at = (name) => named(path, name)?.ms;
  const last = Math.max(...path.events.map((one) => one.ms));
  const end = at("done") ?? at("refused") ?? at("failed") ?? at("left") ?? last;
  const routed = named(path, "routed");
  const decoded = named(path, "decoded");
  const first = at("first token");
  const found = [];
  const add = (name, from, to, series, note = "") => { if (from !== undefined && to !== undefined && to >= from) found.push({ name, from, to, series, note }); };
  add("Gateway", 0, at("queued") ?? at("routed") ?? end, 1, "read, checked, tokenised");
  add("Queue", at("queued"), at("routed") ?? end, 4, `${named(path, "queued")?.ahead_tokens ?? 0} prompt tokens ahead`);
  if (routed) {
    // A hand-over is told on the clock of the decode worker, which begins its time to first token when it has the request.
    const handed = (decoded?.handover_s ?? 0) * 1000;
    const began = first !== undefined && decoded?.handover_at_s !== undefined ? first - decoded.ttft_s * 1000 + decoded.handover_at_s * 1000 : (first ?? end) - handed;
    add("Prefill", routed.ms, Math.max(routed.ms, handed > 0 ? began : (first ?? end)), 2, routed.prefill ? `on ${routed.prefill}` : routed.decode ? `on ${routed.decode}` : "");
    if (handed > 0 && first !== undefined) add("Hand-over", Math.max(routed.ms, began), Math.min(first, Math.max(routed.ms, began) + handed), 3, "K/V to the decode worker");
    if (first !== undefined) add("Decode", first, end, 5, `on ${decoded?.replica ?? routed.decode ?? "a worker"}`);
  }
  return found;
}

/** What a path says of an answer, in the words of the playground. */
export function facts(path) {
  const received = named(path, "received") ?? {};
  const done = named(path, "done") ?? {};
  const decoded = named(path, "decoded") ?? {};
  const first = named(path, "first token");
  const tokens = done.completion_tokens;
  const took = done.ms - first?.ms;
  return {
    ttft_ms: first?.ms,
    total_ms: done.ms,
    tokens_per_s: tokens > 1 && took > 0 ? ((tokens - 1) / took) * 1000 : null,
    prompt_tokens: received.prompt_tokens,
    cached_tokens: done.cached_tokens ?? first?.cached_tokens,
    completion_tokens: tokens,
    drafted: decoded.drafted_tokens,
    accepted: decoded.accepted_tokens,
  };
}
