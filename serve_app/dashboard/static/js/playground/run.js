// Runs a model on its native route, with the time it took here.
import { ai, send } from "../core/api.js";

/**
 * @returns {Promise<{result: any, media: {type: string, url: string}|null, request: string, ms: number}>} `media` for answers that are files
 */
export async function run(model, body) {
  const began = performance.now();
  const response = await send("POST", ai(`/run/${model}`), { body });
  const type = response.headers.get("content-type") ?? "";
  const request = response.headers.get("cf-ray");
  if (/^(image|audio|video)\//.test(type)) {
    const url = URL.createObjectURL(await response.blob());
    return { result: null, media: { type, url }, request, ms: performance.now() - began };
  }
  const { result } = await response.json();
  return { result, media: null, request, ms: performance.now() - began };
}
