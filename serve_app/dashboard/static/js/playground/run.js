// Runs a model on its native route, with the time it took here.
import { ai, ApiError, send } from "../core/api.js";
import { events } from "../core/sse.js";

/**
 * @param {string} model
 * @param {Object} body
 * @param {{signal?: AbortSignal, tell?: (progress: {step: number, steps: number}) => void}} [options] `tell`: of answers that stream
 * @returns {Promise<{result: any, media: {type: string, url: string}|null, request: string, ms: number}>} `media` for answers that are files
 */
export async function run(model, body, { signal, tell = () => {} } = {}) {
  const began = performance.now();
  const response = await send("POST", ai(`/run/${model}`), { body, signal });
  const type = response.headers.get("content-type") ?? "";
  const request = response.headers.get("cf-ray");
  if (/^(image|audio|video)\//.test(type)) {
    const url = URL.createObjectURL(await response.blob());
    return { result: null, media: { type, url }, request, ms: performance.now() - began };
  }
  const result = type.startsWith("text/event-stream") ? await streamed(response, tell) : (await response.json()).result;
  return { result, media: null, request, ms: performance.now() - began };
}

/** The last event that is not progress. */
async function streamed(response, tell) {
  let result = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") return result;
    const told = JSON.parse(data);
    const failure = told.errors?.[0];
    if (failure) throw new ApiError(0, failure.code, failure.message);
    if (told.steps === undefined) result = told;
    else tell(told);
  }
  throw new ApiError(0, null, "The answer broke off. Run it again.");
}
