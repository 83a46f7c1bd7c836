// Code that asks about a picture, of models that see.
import { NEEDS } from "./samples_parts.js";

const QUESTION = "What is in the picture?";
const CLIENT = "With a picture";

/** @returns {import("./samples.js").Sample[]} */
export const seen = (model, { origin }, file) => [
  { language: "curl", client: CLIENT, text: `PICTURE=$(base64 < ${file} | tr -d '\\n')
curl ${origin}/v1/chat/completions \\
  -H "Authorization: Bearer $KEY" \\
  -d @- <<END
{"model": "${model.id}", "messages": [{"role": "user", "content": [
  {"type": "image_url", "image_url": {"url": "data:image/png;base64,$PICTURE"}},
  {"type": "text", "text": "${QUESTION}"}]}]}
END
` },
  { language: "Python", client: CLIENT, needs: NEEDS.openai, text: `import base64
import os
from pathlib import Path

from openai import OpenAI

client = OpenAI(api_key=os.environ["KEY"], base_url="${origin}/v1")
picture = base64.b64encode(Path("${file}").read_bytes()).decode()
content = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    {"type": "text", "text": "${QUESTION}"},
]
answer = client.chat.completions.create(model="${model.id}", messages=[{"role": "user", "content": content}])
print(answer.choices[0].message.content)
` },
  { language: "JavaScript", client: CLIENT, needs: NEEDS.openai_js, text: `import { readFile } from "node:fs/promises";\nimport OpenAI from "openai";

const client = new OpenAI({ apiKey: process.env.KEY, baseURL: "${origin}/v1" });
const url = \`data:image/png;base64,\${await readFile("${file}", "base64")}\`;
const content = [{ type: "image_url", image_url: { url } }, { type: "text", text: "${QUESTION}" }];
const answer = await client.chat.completions.create({ model: "${model.id}", messages: [{ role: "user", content }] });
console.log(answer.choices[0].message.content);
` },
];
