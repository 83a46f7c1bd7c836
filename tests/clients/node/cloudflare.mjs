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

assert.equal((await client.user.tokens.verify()).status, "active");
const accounts = [];
for await (const one of client.accounts.list()) accounts.push(one.id);
assert.ok(accounts.includes(account));
const policies = [{ effect: "allow", permission_groups: [{ id: "read" }], resources: { [`com.cloudflare.api.account.${account}`]: "*" } }];
const made = await client.accounts.tokens.create({ ...where, name: "node", policies });
const reader = new Cloudflare({ apiToken: made.value, baseURL: `${url}/client/v4`, maxRetries: 0 });
assert.equal((await reader.user.tokens.verify()).id, made.id);
await assert.rejects(reader.ai.run(chat, { ...where, prompt: "x" }), Cloudflare.PermissionDeniedError);
const rolled = await client.accounts.tokens.value.update(made.id, { ...where, body: {} });
assert.ok(rolled && rolled !== made.value);
await assert.rejects(reader.user.tokens.verify(), Cloudflare.AuthenticationError);
await client.accounts.tokens.delete(made.id, where);

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
