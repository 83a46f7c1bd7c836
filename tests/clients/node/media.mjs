// Pictures and sounds by every client that sends or gets some: what the shipped voice says, the shipped ear understands.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateSpeech, generateText, transcribe } from "ai";
import Cloudflare from "cloudflare";
import OpenAI, { toFile } from "openai";
import { createWorkersAI } from "workers-ai-provider";
import { account, key, url } from "./shared.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const real = globalThis.fetch;
globalThis.fetch = (input, init) => real(String(input).replace(/^https:\/\/api\.cloudflare\.com/, url), init);

const { PICTURE, SHOWN, VISION_MODEL: vision, SPEAKING_MODEL: voice, HEARING_MODEL: ear } = process.env;
const said = "Turn on the light in the kitchen.";
const question = "What do you see?";
const picture = readFileSync(PICTURE);
const base64 = picture.toString("base64");

const openai = new OpenAI({ apiKey: key, baseURL: `${url}/v1`, maxRetries: 0 });
const spoken = await openai.audio.speech.create({ model: voice, voice: "alloy", input: said, response_format: "wav" });
const wav = Buffer.from(await spoken.arrayBuffer());
assert.equal(wav.subarray(0, 4).toString(), "RIFF");
const file = () => toFile(wav, "said.wav", { type: "audio/wav" });
// The voice says it a little differently each time; what was said once is heard by all alike.
const { text: first } = await openai.audio.transcriptions.create({ model: ear, file: await file() });
assert.match(first, /in the kitchen/i);
const heard = (text) => assert.equal(text, first);
const verbose = await openai.audio.transcriptions.create({
  model: ear, file: await file(), response_format: "verbose_json", timestamp_granularities: ["segment"],
});
assert.ok(verbose.duration > 0.5 && verbose.segments.length >= 1);
let streamed = "";
for await (const event of await openai.audio.transcriptions.create({ model: ear, file: await file(), stream: true }))
  if (event.type === "transcript.text.done") streamed = event.text;
heard(streamed);
await assert.rejects(
  openai.audio.transcriptions.create({ model: ear, file: await toFile(Buffer.from("no sound"), "x.wav") }), OpenAI.BadRequestError,
);

const dataUrl = `data:image/png;base64,${base64}`;
const seen = (await openai.chat.completions.create({
  model: vision, max_tokens: 24, temperature: 0,
  messages: [{ role: "user", content: [{ type: "image_url", image_url: { url: dataUrl } }, { type: "text", text: question }] }],
})).choices[0].message.content;
assert.ok(seen.includes(SHOWN), seen);
const response = await openai.responses.create({
  model: vision, max_output_tokens: 24, temperature: 0,
  input: [{ role: "user", content: [{ type: "input_image", image_url: dataUrl, detail: "auto" }, { type: "input_text", text: question }] }],
});
assert.equal(response.output_text, seen);

const message = await new Anthropic({ apiKey: key, baseURL: url, maxRetries: 0 }).messages.create({
  model: vision, max_tokens: 24, temperature: 0,
  messages: [{ role: "user", content: [
    { type: "image", source: { type: "base64", media_type: "image/png", data: base64 } }, { type: "text", text: question },
  ] }],
});
assert.equal(message.content[0].text, seen);

const cloudflare = new Cloudflare({ apiToken: key, baseURL: `${url}/client/v4`, maxRetries: 0 });
const where = { account_id: account };
const native = await cloudflare.ai.run(vision, { ...where, prompt: question, image: base64, max_tokens: 24, temperature: 0 });
assert.equal(native.response, seen);
heard((await cloudflare.ai.run(ear, { ...where, audio: [...wav] })).text);

const workers = createWorkersAI({ accountId: account, apiKey: key });
const providers = { "workers-ai": workers, openai: createOpenAI({ apiKey: key, baseURL: `${url}/v1` }) };
for (const [name, provider] of Object.entries(providers)) {
  heard((await transcribe({ model: provider.transcription(ear), audio: wav, maxRetries: 0 })).text);
  const { audio } = await generateSpeech({ model: provider.speech(voice), text: said, maxRetries: 0 });
  assert.ok(audio.uint8Array.length > 1000, name);
  const again = await toFile(audio.uint8Array, "said.mp3");
  assert.match((await openai.audio.transcriptions.create({ model: ear, file: again })).text, /in the kitchen/i, name);
}
const models = {
  "workers-ai": workers(vision),
  openai: providers.openai.chat(vision),
  responses: providers.openai(vision),
  anthropic: createAnthropic({ apiKey: key, baseURL: `${url}/v1` })(vision),
};
for (const [name, model] of Object.entries(models)) {
  const content = [{ type: "image", image: picture, mediaType: "image/png" }, { type: "text", text: question }];
  const found = await generateText({
    model, messages: [{ role: "user", content }], maxOutputTokens: 24, temperature: 0, maxRetries: 0,
  });
  assert.equal(found.text, seen, name);
}
