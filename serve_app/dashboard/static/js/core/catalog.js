// The models that are served here, as the pages need them.
import { ai, get } from "./api.js";

/**
 * @typedef {Object} Model
 * @property {string} id       such as @cf/pico/pico-instruct
 * @property {string} task     such as "Text Generation"
 * @property {string} description
 * @property {string} created
 * @property {Object<string, any>} properties
 */

/** @returns {Promise<Model[]>} */
export async function models(signal) {
  const found = await get(ai("/models/search"), { per_page: 1000, include_deprecated: true }, { signal });
  return found.map((one) => ({
    id: one.name,
    task: one.task.name,
    task_about: one.task.description,
    description: one.description,
    created: one.created_at,
    source: one.source,
    tags: one.tags ?? [],
    properties: Object.fromEntries(one.properties.map((property) => [property.property_id, property.value])),
  }));
}

export const schema = (model, signal) => get(ai("/models/schema"), { model }, { signal });

const CHAT = "Text Generation";
export const isChat = (model) => model?.task === CHAT;
/** What a form of its own exists for; everything else gets one made from the model's schema. */
export function kind(model) {
  if (!model) return "";
  if (isChat(model)) return "chat";
  if (model.task === "Text Embeddings") return "embeddings";
  if (/rank/i.test(model.id) || /rerank/i.test(model.description)) return "rerank";
  return { "Text-to-Speech": "speech", "Text-to-Image": "pictures" }[model.task] ?? "form";
}
/** Whether what a kind of model is asked is known without its schema. */
export const special = (name) => ["chat", "embeddings", "rerank"].includes(name);

export const yes = (value) => value === true || value === "true";

/** Models as options of a select, by task. */
export const asOptions = (list) => list.map((one) => ({ value: one.id, label: one.id.replace(/^@(cf|hf)\//, ""), group: one.task }));
