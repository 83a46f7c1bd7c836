// One turn of a conversation: the request, and the stream of its answer.
import { ApiError, ai, send } from "../core/api.js";
import { events } from "../core/sse.js";
import { said } from "./picture.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "seed", "repetition_penalty"];

/** The body of a chat completion for what a lane holds. Raises an Error that names the field whose JSON does not parse. */
export function body(lane) {
  const { settings } = lane;
  const messages = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const one of lane.messages) {
    // What was stopped before its first token is no turn.
    if (one.error || one.busy || (one.stopped && !one.content && !one.calls.length)) continue;
    if (one.role === "tool") messages.push({ role: "tool", tool_call_id: one.tool_call_id, content: one.content });
    else if (one.calls?.length) {
      const calls = one.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      messages.push({ role: "assistant", content: one.content || null, tool_calls: calls });
    } else messages.push({ role: one.role, content: said(one) });
  }
  const asked = { model: lane.model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (settings[name] !== "") asked[name] = Number(settings[name]);
  if (settings.adapter) asked.lora = settings.adapter;
  if (settings.reasoning) asked.reasoning_effort = settings.reasoning;
  if (settings.tools.trim()) asked.tools = wrapped(parsed(settings.tools, "Tools"));
  if (settings.schema.trim()) {
    const schema = parsed(settings.schema, "JSON schema");
    asked.response_format = { type: "json_schema", json_schema: schema.schema ? schema : { name: "answer", schema } };
  }
  return asked;
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is no JSON: ${error.message}`);
  }
}

const wrapped = (tools) => (Array.isArray(tools) ? tools : [tools]).map((one) => (one.function ? one : { type: "function", function: one }));

/**
 * Asks for the answer to what a lane holds and adds it as it comes. `changed` is called after every change.
 * @param {Object} lane
 * @param {() => void} changed
 */
export async function answer(lane, changed) {
  const asked = body(lane);
  const message = { role: "assistant", content: "", reasoning: "", calls: [], busy: true, clock: { sent: performance.now() } };
  lane.messages.push(message);
  lane.controller = new AbortController();
  changed();
  try {
    const response = await send("POST", ai("/v1/chat/completions"), { body: asked, signal: lane.controller.signal });
    message.request = response.headers.get("cf-ray");
    for await (const data of events(response, (text) => { message.note = text; changed(); })) {
      if (data === "[DONE]") break;
      take(message, JSON.parse(data));
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") message.stopped = true;
    else message.error = error.message;
  }
  message.note = "";
  message.busy = false;
  lane.controller = null;
  changed();
}

function take(message, chunk) {
  const failure = chunk.errors?.[0] ?? chunk.error;
  if (failure) throw new ApiError(0, failure.code, failure.message);
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if (content || reasoning || calls) {
    const now = performance.now();
    message.clock.first ??= now;
    message.clock.last = now;
    message.note = "";
  }
  message.content += content ?? "";
  message.reasoning += reasoning ?? "";
  for (const call of calls ?? []) {
    message.calls[call.index] ??= { id: "", name: "", arguments: "" };
    const mine = message.calls[call.index];
    mine.id = call.id ?? mine.id;
    mine.name += call.function?.name ?? "";
    mine.arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}
