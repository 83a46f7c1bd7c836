// The models that are served here, as the pages need them.
import { ai, get } from "./api.js";

/**
 * @typedef {Object} Model
 * @property {string} id       such as @cf/pico/pico-instruct
 * @property {string} task     what it does, in words
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

/** What a form of its own exists for, as the model's task says; everything else gets one made from the model's schema. */
export const kind = (model) => (model ? model.properties.interface ?? "form" : "");
export const isChat = (model) => kind(model) === "chat";
/** Whether what a kind of model is asked is known without its schema. */
export const special = (name) => ["chat", "embeddings", "rerank"].includes(name);

export const yes = (value) => value === true || value === "true";

/** Models as options of a select, by task. */
export const asOptions = (list) => list.map((one) => ({ value: one.id, label: one.id.replace(/^@(cf|hf)\//, ""), group: one.task }));
