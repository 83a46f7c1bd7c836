// Code that runs a model at this server, to paste. KEY comes from the environment, so that none is pasted into a file.
import { isChat, kind, yes } from "../core/catalog.js";
import { example, fields } from "../playground/fields.js";
import { chats } from "./samples_chat.js";
import { NEEDS, python, quoted } from "./samples_parts.js";
import { seen } from "./samples_seen.js";
import { pictures, speech, transcripts, vectors } from "./samples_tasks.js";

export const LANGUAGES = ["curl", "Python", "JavaScript"];

const ASKED = {
  chat: { messages: [{ role: "user", content: "What does math.sqrt do?" }] },
  embeddings: { text: ["How is a square root computed?", "Open a file."] },
  rerank: { query: "How is a square root computed?", contexts: [{ text: "Close a file." }, { text: "Return the square root of x." }] },
};

// Names of files that stand for one's own, by field.
const FILES = { image: "picture.png", audio: "sound.wav" };

/**
 * @typedef {Object} Sample
 * @property {string} language  one of LANGUAGES
 * @property {string} client    what it calls the server with
 * @property {string} text
 * @property {string} [needs]   what has to be installed
 */

/**
 * @param {Object} model
 * @param {{origin: string, account: string}} where
 * @param {Object} [input]  the schema of the model's input, of a task that has no form of its own
 * @returns {Sample[]}
 */
export function samples(model, { origin, account }, input) {
  const at = { origin, account, api: `${origin}/client/v4/accounts/${account}/ai` };
  const list = input ? fields(input) : [];
  // A body can be the file alone where nothing else is needed.
  const sent = list.find((one) => one.shape === "file" && (one.needed || !list.some((other) => other.needed)));
  const asked = ASKED[kind(model)] ?? example(input, list);
  if (kind(model) === "speech") return speech(model, at, asked.prompt);
  if (kind(model) === "pictures") return pictures(model, at, asked.prompt);
  const file = sent && (FILES[sent.name] ?? "file");
  const found = [...(sent ? sendsFile(model, at, file) : sendsJson(model, at, asked)), ...cloudflare(model, at, sent, file, asked)];
  if (isChat(model)) found.push(...chats(model, at));
  if (yes(model.properties.vision)) found.push(...seen(model, at, FILES.image));
  if (kind(model) === "embeddings") found.push(...vectors(model, at, asked.text));
  if (sent?.name === "audio") found.push(...transcripts(model, at, file));
  return found;
}

const sendsJson = (model, { api }, asked) => [
  { language: "curl", client: "Workers AI", text: `curl ${api}/run/${model.id} \\\n  -H "Authorization: Bearer $KEY" \\\n  -d ${quoted(asked)}\n` },
  { language: "Python", client: "httpx", needs: NEEDS.httpx, text: inPython(model, api, "", `json=${python(asked)}`) },
  { language: "JavaScript", client: "fetch", text: inJavaScript(model, api, "", `JSON.stringify(${JSON.stringify(asked)})`) },
];

const sendsFile = (model, { api }, file) => [
  { language: "curl", client: "Workers AI", text: `curl ${api}/run/${model.id} \\\n  -H "Authorization: Bearer $KEY" \\\n  -H "Content-Type: application/octet-stream" \\\n  --data-binary @${file}\n` },
  { language: "Python", client: "httpx", needs: NEEDS.httpx, text: inPython(model, api, "from pathlib import Path\n", `content=Path("${file}").read_bytes()`) },
  { language: "JavaScript", client: "fetch", text: inJavaScript(model, api, 'import { readFile } from "node:fs/promises";\n\n', `await readFile("${file}")`) },
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
const { result, errors } = await answer.json();
if (!answer.ok) throw new Error(errors[0].message);
console.log(result);
`;

/** Cloudflare's own clients, which know rerankers by the text of their other classifiers. */
function cloudflare(model, { origin, account }, sent, file, asked) {
  const rerank = kind(model) === "rerank";
  const given = sent ? `${sent.name}=list(Path("${file}").read_bytes())`
    : rerank ? `text="", extra_body=${python(asked)}` : Object.entries(asked).map(([name, value]) => `${name}=${python(value)}`).join(", ");
  const given_js = sent ? `${sent.name}: [...await readFile("${file}")]` : `${rerank ? 'text: "", ' : ""}...${JSON.stringify(asked)}`;
  return [
    { language: "Python", client: "Cloudflare", needs: NEEDS.cloudflare, text: `import os
${sent ? "from pathlib import Path\n" : ""}
from cloudflare import Cloudflare

client = Cloudflare(api_token=os.environ["KEY"], base_url="${origin}/client/v4")
print(client.ai.run("${model.id}", account_id="${account}", ${given}))
` },
    { language: "JavaScript", client: "Cloudflare", needs: NEEDS.cloudflare_js, text: `${sent ? 'import { readFile } from "node:fs/promises";\n' : ""}import Cloudflare from "cloudflare";

const client = new Cloudflare({ apiToken: process.env.KEY, baseURL: "${origin}/client/v4" });
console.log(await client.ai.run("${model.id}", { account_id: "${account}", ${given_js} }));
` },
  ];
}
