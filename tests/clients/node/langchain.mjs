import assert from "node:assert/strict";
import { tool } from "@langchain/core/tools";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { chat, city, embed, key, question, url, weather, weatherQuestion } from "./shared.mjs";

const configuration = { baseURL: `${url}/v1` };
for (const useResponsesApi of [false, true]) {
  const model = new ChatOpenAI({ model: chat, apiKey: key, configuration, temperature: 0, maxRetries: 0, useResponsesApi });
  const whole = await model.invoke(question);
  assert.match(whole.text, /square root/);
  let streamed = "";
  for await (const piece of await model.stream(question)) streamed += piece.text;
  assert.equal(streamed, whole.text);

  const getWeather = tool(async () => "sunny, 21 C", { ...weather, schema: city });
  const armed = model.bindTools([getWeather]);
  const asked = new HumanMessage(weatherQuestion);
  const answer = await armed.invoke([asked]);
  assert.deepEqual(answer.tool_calls.map((c) => [c.name, c.args]), [["get_weather", { city: "Paris" }]]);
  let gathered;
  for await (const piece of await armed.stream([asked])) gathered = gathered ? gathered.concat(piece) : piece;
  assert.deepEqual(gathered.tool_calls.map((c) => [c.name, c.args]), [["get_weather", { city: "Paris" }]]);
  const result = new ToolMessage({ content: "sunny, 21 C", tool_call_id: answer.tool_calls[0].id });
  assert.ok((await armed.invoke([asked, answer, result])).text);
}

const vectors = await new OpenAIEmbeddings({ model: embed, apiKey: key, configuration }).embedDocuments(["one", "two"]);
assert.deepEqual(vectors.map((v) => v.length), [384, 384]);
