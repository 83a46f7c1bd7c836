import assert from "node:assert/strict";
import OpenAI from "openai";
import { chat, embed, key, question, underAccount, url, weather, weatherQuestion } from "./shared.mjs";

for (const baseURL of [`${url}/v1`, `${underAccount}/v1`]) {
  const client = new OpenAI({ apiKey: key, baseURL, maxRetries: 0 });
  const asked = { model: chat, messages: [{ role: "user", content: question }], temperature: 0 };

  const plain = await client.chat.completions.create(asked);
  const text = plain.choices[0].message.content;
  assert.match(text, /square root/);

  const chunks = await client.chat.completions.create({
    ...asked, stream: true, stream_options: { include_usage: true },
  });
  let streamed = "", usage;
  for await (const chunk of chunks) {
    streamed += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(streamed, text);
  assert.equal(usage.completion_tokens, plain.usage.completion_tokens);

  const tools = [{ type: "function", function: weather }];
  const stream = client.chat.completions.stream({
    model: chat, messages: [{ role: "user", content: weatherQuestion }], tools, temperature: 0,
  });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].finish_reason, "tool_calls");
  const call = final.choices[0].message.tool_calls[0];
  assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["get_weather", { city: "Paris" }]);

  const runner = client.chat.completions.runTools({
    model: chat, messages: [{ role: "user", content: weatherQuestion }], temperature: 0,
    tools: [{ type: "function", function: { ...weather, parse: JSON.parse, function: () => "sunny, 21 C" } }],
  });
  assert.ok(await runner.finalContent());

  const vectors = await client.embeddings.create({ model: embed, input: ["one", "two"] });
  assert.equal(vectors.data[1].embedding.length, 384);
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.ok(ids.includes(chat));

  const answer = await client.responses.create({ model: chat, input: question, temperature: 0 });
  assert.equal(answer.output_text, text);
  const events = client.responses.stream({ model: chat, input: question, temperature: 0 });
  assert.equal((await events.finalResponse()).output_text, text);
  const next = await client.responses.create({ model: chat, input: "And math.cos?", previous_response_id: answer.id });
  assert.ok(next.output_text);

  await assert.rejects(client.chat.completions.create({ ...asked, model: "@cf/no/such" }), OpenAI.NotFoundError);
  await assert.rejects(
    new OpenAI({ apiKey: "wrong", baseURL, maxRetries: 0 }).models.list(), OpenAI.AuthenticationError,
  );
}
