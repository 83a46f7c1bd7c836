// The AI SDK, with Cloudflare's provider (its hosts are built in: fetch takes them here) and with the OpenAI one.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, isStepCount, jsonSchema, rerank as rank, streamText, tool } from "ai";
import { createWorkersAI } from "workers-ai-provider";
import { account, chat, city, embed, key, question, rerank, url, weatherQuestion } from "./shared.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const real = globalThis.fetch;
globalThis.fetch = (input, init) =>
  real(String(input).replace(/^https:\/\/(api|gateway\.ai)\.cloudflare\.com/, url), init);

const get_weather = tool({
  description: "Get the current weather of a city",
  inputSchema: jsonSchema(city),
  execute: async () => "sunny, 21 C",
});

const direct = createWorkersAI({ accountId: account, apiKey: key });
const models = {
  "workers-ai": direct(chat),
  "workers-ai with affinity": direct(chat, { sessionAffinity: "s1" }),
  "workers-ai behind a gateway": createWorkersAI({ accountId: account, apiKey: key, gateway: { id: "default" } })(chat),
  // Its conversations refer to the items of earlier responses, by their ids.
  "openai responses": createOpenAI({ apiKey: key, baseURL: `${url}/v1` })(chat),
  "openai chat": createOpenAI({ apiKey: key, baseURL: `${url}/v1` }).chat(chat),
  "anthropic": createAnthropic({ apiKey: key, baseURL: `${url}/v1` })(chat),
  "openai-compatible": createOpenAICompatible({ name: "here", apiKey: key, baseURL: `${url}/v1`, includeUsage: true })(chat),
};
for (const [name, model] of Object.entries(models)) {
  const { text, finishReason, usage } = await generateText({ model, prompt: question, temperature: 0, maxRetries: 0 });
  assert.match(text, /square root/, name);
  assert.equal(finishReason, "stop", name);
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0, name);

  const streamed = streamText({ model, prompt: question, temperature: 0, maxRetries: 0 });
  let said = "";
  for await (const piece of streamed.textStream) said += piece;
  assert.equal(said, text, name);
  assert.equal(await streamed.finishReason, "stop", name);
  assert.equal((await streamed.usage).outputTokens, usage.outputTokens, name);

  for (const ask of [generateText, streamText]) {
    const run = await ask({
      model, prompt: weatherQuestion, tools: { get_weather }, stopWhen: isStepCount(2), temperature: 0, maxRetries: 0,
    });
    const steps = await run.steps;
    assert.equal(steps[0].finishReason, "tool-calls", name);
    assert.deepEqual(steps[0].toolCalls.map((c) => [c.toolName, c.input]), [["get_weather", { city: "Paris" }]], name);
    assert.equal(steps.length, 2, name);
  }
}

const { embeddings } = await embedMany({ model: direct.textEmbedding(embed), values: ["one", "two"] });
assert.deepEqual(embeddings.map((e) => e.length), [384, 384]);
const documents = ["Close a file.", "Return the square root of x."];
const { ranking } = await rank({ model: direct.reranking(rerank), query: "How is a square root computed?", documents, topN: 1 });
assert.deepEqual(ranking.map((r) => r.originalIndex), [1]);
await assert.rejects(generateText({ model: direct("@cf/no/such"), prompt: "x", maxRetries: 0 }), (error) => {
  assert.equal(error.statusCode, 400);
  return true;
});
