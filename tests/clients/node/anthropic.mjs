import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { chat, city, key, question, underAccount, url, weather, weatherQuestion } from "./shared.mjs";

for (const baseURL of [url, underAccount, `${underAccount}/v1`]) {
  const client = new Anthropic({ apiKey: key, baseURL, maxRetries: 0 });
  const asked = { model: chat, max_tokens: 64, messages: [{ role: "user", content: question }], temperature: 0 };
  const plain = await client.messages.create(asked);
  assert.match(plain.content[0].text, /square root/);
  assert.equal(plain.stop_reason, "end_turn");
  const final = await client.messages.stream(asked).finalMessage();
  assert.deepEqual(final.content.map((b) => b.text), plain.content.map((b) => b.text));
  assert.equal(final.usage.output_tokens, plain.usage.output_tokens);

  const tools = [{ name: weather.name, description: weather.description, input_schema: city }];
  const calling = await client.messages
    .stream({ ...asked, messages: [{ role: "user", content: weatherQuestion }], tools }).finalMessage();
  const use = calling.content.find((block) => block.type === "tool_use");
  assert.deepEqual([use.name, use.input, calling.stop_reason], ["get_weather", { city: "Paris" }, "tool_use"]);
  const counted = await client.messages.countTokens({ model: chat, messages: asked.messages });
  assert.ok(counted.input_tokens > 0);
  await assert.rejects(client.messages.create({ ...asked, model: "@cf/no/such" }), Anthropic.NotFoundError);
}
