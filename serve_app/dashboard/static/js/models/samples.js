// Code that runs a model at this server, to paste. KEY comes from the environment, so that none is pasted into a file.
import { isChat, kind } from "../core/catalog.js";
import { example, fields } from "../playground/fields.js";

const ASKED = {
  chat: { messages: [{ role: "user", content: "What does math.sqrt do?" }] },
  embeddings: { text: ["How is a square root computed?", "Open a file."] },
  rerank: { query: "How is a square root computed?", contexts: [{ text: "Close a file." }, { text: "Return the square root of x." }] },
};

/** JSON in a shell's single quotes. */
const quoted = (value) => `'${JSON.stringify(value).replaceAll("'", "'\\''")}'`;
const python = (value) => JSON.stringify(value).replace(/\btrue\b/g, "True").replace(/\bfalse\b/g, "False").replace(/\bnull\b/g, "None").replaceAll('":', '": ').replaceAll(',"', ', "');

// Names of files that stand for one's own, by field.
const FILES = { image: "picture.png", audio: "sound.wav" };

/**
 * @param {Object} model
 * @param {{origin: string, account: string}} where
 * @param {Object} [input]  the schema of the model's input, of a task that has no form of its own
 * @returns {{name: string, title: string, text: string}[]}
 */
export function samples(model, { origin, account }, input) {
  const list = input ? fields(input) : [];
  const sent = list.find((one) => one.shape === "file");
  const asked = ASKED[kind(model)] ?? example(input, list);
  const api = `${origin}/client/v4/accounts/${account}/ai`;
  const native = sent ? sendsFile(model, api, FILES[sent.name] ?? "file") : sendsJson(model, api, asked);
  const found = [...native, { name: "cloudflare", title: "Cloudflare SDK", text: cloudflare(model, sent, asked, origin, account) }];
  if (isChat(model)) found.push(...chats(model, origin));
  if (kind(model) === "embeddings") found.push({ name: "openai", title: "OpenAI SDK", text: `import os

from openai import OpenAI

client = OpenAI(api_key=os.environ["KEY"], base_url="${origin}/v1")
vectors = client.embeddings.create(model="${model.id}", input=${python(asked.text)})
print(len(vectors.data[0].embedding))
` });
  return found;
}

const sendsJson = (model, api, asked) => [
  { name: "curl", title: "curl", text: `curl ${api}/run/${model.id} \\\n  -H "Authorization: Bearer $KEY" \\\n  -d ${quoted(asked)}\n` },
  { name: "python", title: "Python", text: inPython(model, api, "", `json=${python(asked)}`) },
  { name: "javascript", title: "JavaScript", text: inJavaScript(model, api, "", `JSON.stringify(${JSON.stringify(asked)})`) },
];

const sendsFile = (model, api, file) => [
  { name: "curl", title: "curl", text: `curl ${api}/run/${model.id} \\\n  -H "Authorization: Bearer $KEY" \\\n  -H "Content-Type: application/octet-stream" \\\n  --data-binary @${file}\n` },
  { name: "python", title: "Python", text: inPython(model, api, "from pathlib import Path\n", `content=Path("${file}").read_bytes()`) },
  { name: "javascript", title: "JavaScript", text: inJavaScript(model, api, 'import { readFile } from "node:fs/promises";\n\n', `await readFile("${file}")`) },
];

const inPython = (model, api, imports, given) => `import os
${imports}
import httpx

answer = httpx.post(
    "${api}/run/${model.id}",
    headers={"Authorization": f"Bearer {os.environ['KEY']}"},
    ${given},
    timeout=60,
)
answer.raise_for_status()
print(answer.json()["result"])
`;

const inJavaScript = (model, api, imports, given) => `${imports}const answer = await fetch("${api}/run/${model.id}", {
  method: "POST",
  headers: { Authorization: \`Bearer \${process.env.KEY}\` },
  body: ${given},
});
console.log((await answer.json()).result);
`;

function cloudflare(model, sent, asked, origin, account) {
  const file = sent && `list(Path("${FILES[sent.name] ?? "file"}").read_bytes())`;
  // The client knows rerankers by the text of its other classifiers.
  const rerank = kind(model) === "rerank";
  const native = sent ? `${sent.name}=${file}` : rerank ? `text="", extra_body=${python(asked)}` : Object.entries(asked).map(([name, value]) => `${name}=${python(value)}`).join(", ");
  return `import os
${sent ? "from pathlib import Path\n" : ""}
from cloudflare import Cloudflare

client = Cloudflare(api_token=os.environ["KEY"], base_url="${origin}/client/v4")
print(client.ai.run("${model.id}", account_id="${account}", ${native}))
`;
}

function chats(model, origin) {
  const question = '[{"role": "user", "content": "What does math.sqrt do?"}]';
  return [
    { name: "openai", title: "OpenAI SDK", text: `import os

from openai import OpenAI

client = OpenAI(api_key=os.environ["KEY"], base_url="${origin}/v1")
stream = client.chat.completions.create(model="${model.id}", messages=${question}, stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
` },
    { name: "openai-js", title: "OpenAI SDK, JavaScript", text: `import OpenAI from "openai";

const client = new OpenAI({ apiKey: process.env.KEY, baseURL: "${origin}/v1" });
const stream = await client.chat.completions.create({
  model: "${model.id}",
  messages: [{ role: "user", content: "What does math.sqrt do?" }],
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
` },
    { name: "anthropic", title: "Anthropic SDK", text: `import os

from anthropic import Anthropic

client = Anthropic(api_key=os.environ["KEY"], base_url="${origin}")
with client.messages.stream(model="${model.id}", max_tokens=200, messages=${question}) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
` },
    { name: "langchain", title: "LangChain", text: `import os

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(model="${model.id}", api_key=os.environ["KEY"], base_url="${origin}/v1")
print(chat.invoke("What does math.sqrt do?").content)
` },
    { name: "ollama", title: "Ollama", text: `curl ${origin}/api/chat \\\n  -H "Authorization: Bearer $KEY" \\\n  -d ${quoted({ model: model.id, messages: [{ role: "user", content: "What does math.sqrt do?" }], stream: false })}\n` },
    { name: "binding", title: "Python, on the cluster", text: `from serve_app import AI

ai = AI()
print(ai.run("${model.id}", {"prompt": "What does math.sqrt do?"})["response"])
` },
  ];
}
