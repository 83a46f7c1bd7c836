// What the playground holds: one or two lanes, each a conversation with its own model and settings. It stays while one looks
// at other pages, and is in no storage: a prompt is gone with the tab or the session.

let count = 0;

/** Settings that are left empty are the model's own. */
const SETTINGS = {
  adapter: "", system: "", temperature: "", max_tokens: "", top_p: "", top_k: "", seed: "", repetition_penalty: "",
  tools: "", schema: "", reasoning: "",
};

/**
 * @typedef {Object} Message
 * @property {"user"|"assistant"|"tool"} role
 * @property {string} content
 * @property {string} [picture]  a data URL
 * @property {string} [reasoning]
 * @property {{id: string, name: string, arguments: string}[]} [calls]
 * @property {string} [tool_call_id]
 * @property {string} [request]  id of the request that made it
 * @property {Object} [usage]
 * @property {Object} [clock]    times on this page's clock: sent, first, last, in ms
 * @property {string} [error]
 * @property {boolean} [busy]
 */

export const newLane = (model = "", settings = {}) => ({ id: ++count, model, settings: { ...SETTINGS, ...settings }, messages: [], controller: null });

export const state = { lanes: [newLane()], draft: "", picture: "", edited: 0 };

/** A second lane beside the first, with the same settings and the same questions to come. */
export function compare() {
  const [first] = state.lanes;
  state.lanes = [first, { ...newLane(first.model, first.settings), messages: first.messages.map((one) => ({ ...one })) }];
  state.edited = 1;
}

export function single() {
  state.lanes[1]?.controller?.abort();
  state.lanes = state.lanes.slice(0, 1);
  state.edited = 0;
}

export function clear() {
  for (const lane of state.lanes) {
    lane.controller?.abort();
    lane.messages = [];
  }
}

export const busy = () => state.lanes.some((lane) => lane.controller);
