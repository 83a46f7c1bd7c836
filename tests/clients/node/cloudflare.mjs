import assert from "node:assert/strict";
import Cloudflare from "cloudflare";
import { account, chat, embed, key, question, rerank, url } from "./shared.mjs";

const client = new Cloudflare({ apiToken: key, baseURL: `${url}/client/v4`, maxRetries: 0 });
const where = { account_id: account };

const answer = await client.ai.run(chat, { ...where, prompt: question, temperature: 0 });
assert.match(answer.response, /square root/);
assert.equal(answer.finish_reason, "stop");
const talked = await client.ai.run(chat, {
  ...where, messages: [{ role: "user", content: question }], temperature: 0,
});
assert.equal(talked.response, answer.response);
const vectors = await client.ai.run(embed, { ...where, text: ["a", "b"] });
assert.deepEqual(vectors.shape, [2, 384]);
const contexts = [{ text: "Return the square root of x." }, { text: "Close a file." }];
const ranked = await client.ai.run(rerank, { ...where, text: "", query: "How is a square root computed?", contexts });
assert.equal(ranked.response[0].id, 0);

const names = [];
for await (const model of client.ai.models.list({ ...where, per_page: 1 })) names.push(model.name);
assert.ok(names.includes(chat) && names.includes(embed) && names.includes(rerank));
const schema = await client.ai.models.schema.get({ ...where, model: chat });
assert.ok(schema.input && schema.output);
const authors = [];
for await (const author of client.ai.authors.list(where)) authors.push(author);
assert.ok(authors.length);

await assert.rejects(client.ai.run("@cf/no/such", { ...where, prompt: "x" }), (error) => {
  assert.equal(error.status, 400);
  assert.equal(error.errors[0].code, 5007);
  return true;
});
await assert.rejects(
  new Cloudflare({ apiToken: "wrong-key-wrong-key", baseURL: `${url}/client/v4`, maxRetries: 0 })
    .ai.run(chat, { ...where, prompt: "x" }),
  Cloudflare.AuthenticationError,
);
