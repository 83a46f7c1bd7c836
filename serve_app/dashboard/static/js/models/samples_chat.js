// Code of the clients that people chat with.
import { NEEDS, quoted } from "./samples_parts.js";

const QUESTION = "What does math.sqrt do?";
const MESSAGES = `[{"role": "user", "content": "${QUESTION}"}]`;
const MESSAGES_JS = `[{ role: "user", content: "${QUESTION}" }]`;
const AI_SDK = 'import { createOpenAICompatible } from "@ai-sdk/openai-compatible";\nimport { streamText } from "ai";';
const DECIDED = { state: "My invoice is wrong!", questions: { urgent: { type: "noul", instructions: "Does it have to be answered today?" } } };

const shell = (client, url, body) => ({ language: "curl", client, text: `curl ${url} \\\n  -H "Authorization: Bearer $KEY" \\\n  -d ${quoted(body)}\n` });

/** @returns {import("./samples.js").Sample[]} */
export function chats(model, { origin, api }) {
  const messages = [{ role: "user", content: QUESTION }];
  return [
    shell("OpenAI", `${origin}/v1/chat/completions`, { model: model.id, messages }),
    shell("Anthropic", `${origin}/v1/messages`, { model: model.id, max_tokens: 200, messages }),
    shell("Ollama", `${origin}/api/chat`, { model: model.id, messages, stream: false }),
    shell("Decisions", `${api}/run/${model.id}`, DECIDED),
    { language: "Python", client: "OpenAI", needs: NEEDS.openai, text: `import os

from openai import OpenAI

client = OpenAI(api_key=os.environ["KEY"], base_url="${origin}/v1")
stream = client.chat.completions.create(model="${model.id}", messages=${MESSAGES}, stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
` },
    { language: "Python", client: "Anthropic", needs: NEEDS.anthropic, text: `import os

from anthropic import Anthropic

client = Anthropic(api_key=os.environ["KEY"], base_url="${origin}")
with client.messages.stream(model="${model.id}", max_tokens=200, messages=${MESSAGES}) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
` },
    { language: "Python", client: "LangChain", needs: NEEDS.langchain, text: `import os

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(model="${model.id}", api_key=os.environ["KEY"], base_url="${origin}/v1")
print(chat.invoke("${QUESTION}").content)
` },
    { language: "Python", client: "On the cluster", text: `from serve_app import AI

ai = AI()
print(ai.run("${model.id}", {"prompt": "${QUESTION}"})["response"])
` },
    { language: "JavaScript", client: "OpenAI", needs: NEEDS.openai_js, text: `import OpenAI from "openai";

const client = new OpenAI({ apiKey: process.env.KEY, baseURL: "${origin}/v1" });
const stream = await client.chat.completions.create({ model: "${model.id}", messages: ${MESSAGES_JS}, stream: true });
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
console.log();
` },
    { language: "JavaScript", client: "Anthropic", needs: NEEDS.anthropic_js, text: `import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ apiKey: process.env.KEY, baseURL: "${origin}" });
const stream = client.messages.stream({ model: "${model.id}", max_tokens: 200, messages: ${MESSAGES_JS} });
for await (const event of stream) if (event.type === "content_block_delta") process.stdout.write(event.delta.text ?? "");
console.log();
` },
    { language: "JavaScript", client: "LangChain", needs: NEEDS.langchain_js, text: `import { ChatOpenAI } from "@langchain/openai";

const chat = new ChatOpenAI({ model: "${model.id}", apiKey: process.env.KEY, configuration: { baseURL: "${origin}/v1" } });
console.log((await chat.invoke("${QUESTION}")).content);
` },
    { language: "JavaScript", client: "AI SDK", needs: NEEDS.ai, text: `${AI_SDK}

const provider = createOpenAICompatible({ name: "serve-app", apiKey: process.env.KEY, baseURL: "${origin}/v1" });
const { textStream } = streamText({ model: provider("${model.id}"), prompt: "${QUESTION}" });
for await (const text of textStream) process.stdout.write(text);
console.log();
` },
  ];
}
