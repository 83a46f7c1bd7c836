// Code for what OpenAI's clients do beside chatting: vectors, transcripts, speech, pictures.
import { NEEDS, python, quoted } from "./samples_parts.js";

const head = (origin) => `import os

from openai import OpenAI

client = OpenAI(api_key=os.environ["KEY"], base_url="${origin}/v1")
`;
const head_js = (origin) => `import OpenAI from "openai";

const client = new OpenAI({ apiKey: process.env.KEY, baseURL: "${origin}/v1" });
`;

export const vectors = (model, { origin }, texts) => [
  { language: "curl", client: "OpenAI", text: `curl ${origin}/v1/embeddings \\\n  -H "Authorization: Bearer $KEY" \\\n  -d ${quoted({ model: model.id, input: texts })}\n` },
  { language: "Python", client: "OpenAI", needs: NEEDS.openai, text: `${head(origin)}answer = client.embeddings.create(model="${model.id}", input=${python(texts)})
print([len(one.embedding) for one in answer.data])
` },
  { language: "JavaScript", client: "OpenAI", needs: NEEDS.openai_js, text: `${head_js(origin)}const answer = await client.embeddings.create({ model: "${model.id}", input: ${JSON.stringify(texts)} });
console.log(answer.data.map((one) => one.embedding.length));
` },
];

export const transcripts = (model, { origin }, file) => [
  { language: "curl", client: "OpenAI", text: `curl ${origin}/v1/audio/transcriptions \\\n  -H "Authorization: Bearer $KEY" \\\n  --form-string model=${model.id} -F file=@${file}\n` },
  { language: "Python", client: "OpenAI", needs: NEEDS.openai, text: `${head(origin)}with open("${file}", "rb") as sound:
    print(client.audio.transcriptions.create(model="${model.id}", file=sound).text)
` },
  { language: "JavaScript", client: "OpenAI", needs: NEEDS.openai_js, text: `import { createReadStream } from "node:fs";
${head_js(origin)}const sound = createReadStream("${file}");
console.log((await client.audio.transcriptions.create({ model: "${model.id}", file: sound })).text);
` },
];

/** The answer is a sound, which goes into a file. */
export const speech = (model, { origin, account, api }, text) => [
  { language: "curl", client: "Workers AI", text: `curl ${api}/run/${model.id} \\\n  -H "Authorization: Bearer $KEY" \\\n  -d ${quoted({ text })} \\\n  --fail-with-body --output speech.mp3\n` },
  { language: "curl", client: "OpenAI", text: `curl ${origin}/v1/audio/speech \\\n  -H "Authorization: Bearer $KEY" \\\n  -d ${quoted({ model: model.id, input: text, voice: "0" })} \\\n  --fail-with-body --output speech.mp3\n` },
  { language: "Python", client: "httpx", needs: NEEDS.httpx, text: `import os
from pathlib import Path

import httpx

answer = httpx.post(
    "${api}/run/${model.id}",
    headers={"Authorization": f"Bearer {os.environ['KEY']}"},
    json=${python({ text })},
    timeout=60,
)
answer.raise_for_status()
Path("speech.mp3").write_bytes(answer.content)
` },
  { language: "Python", client: "Cloudflare", needs: NEEDS.cloudflare, text: `import base64
import os
from pathlib import Path

from cloudflare import Cloudflare

client = Cloudflare(api_token=os.environ["KEY"], base_url="${origin}/client/v4")
answer = client.ai.run("${model.id}", account_id="${account}", prompt=${python(text)})
Path("speech.mp3").write_bytes(base64.b64decode(answer["audio"]))
` },
  { language: "Python", client: "OpenAI", needs: NEEDS.openai, text: `${head(origin)}answer = client.audio.speech.create(model="${model.id}", input=${python(text)}, voice="0")
answer.write_to_file("speech.mp3")
` },
  { language: "JavaScript", client: "fetch", text: `import { writeFile } from "node:fs/promises";

const answer = await fetch("${api}/run/${model.id}", {
  method: "POST",
  headers: { Authorization: \`Bearer \${process.env.KEY}\` },
  body: JSON.stringify(${JSON.stringify({ text })}),
});
if (!answer.ok) throw new Error(await answer.text());
await writeFile("speech.mp3", Buffer.from(await answer.arrayBuffer()));
` },
  { language: "JavaScript", client: "OpenAI", needs: NEEDS.openai_js, text: `import { writeFile } from "node:fs/promises";
${head_js(origin)}const answer = await client.audio.speech.create({ model: "${model.id}", input: ${JSON.stringify(text)}, voice: "0" });
await writeFile("speech.mp3", Buffer.from(await answer.arrayBuffer()));
` },
];

/** The answer is a picture, which goes into a file: by `Accept` as what it is, or as base64. */
export const pictures = (model, { origin, account, api }, prompt) => [
  { language: "curl", client: "Workers AI", text: `curl ${api}/run/${model.id} \\\n  -H "Authorization: Bearer $KEY" \\\n  -H "Accept: image/png" \\\n  -d ${quoted({ prompt })} \\\n  --fail-with-body --output picture.png\n` },
  { language: "Python", client: "httpx", needs: NEEDS.httpx, text: `import os
from pathlib import Path

import httpx

answer = httpx.post(
    "${api}/run/${model.id}",
    headers={"Authorization": f"Bearer {os.environ['KEY']}", "Accept": "image/png"},
    json=${python({ prompt })},
    timeout=600,
)
answer.raise_for_status()
Path("picture.png").write_bytes(answer.content)
` },
  { language: "Python", client: "Cloudflare", needs: NEEDS.cloudflare, text: `import base64
import os
from pathlib import Path

from cloudflare import Cloudflare

client = Cloudflare(api_token=os.environ["KEY"], base_url="${origin}/client/v4")
answer = client.ai.run("${model.id}", account_id="${account}", prompt=${python(prompt)})
Path("picture.png").write_bytes(base64.b64decode(answer["image"]))
` },
  { language: "Python", client: "OpenAI", needs: NEEDS.openai, text: `import base64
from pathlib import Path
${head(origin)}answer = client.images.generate(model="${model.id}", prompt=${python(prompt)}, output_format="png")
Path("picture.png").write_bytes(base64.b64decode(answer.data[0].b64_json))
` },
  { language: "JavaScript", client: "fetch", text: `import { writeFile } from "node:fs/promises";

const answer = await fetch("${api}/run/${model.id}", {
  method: "POST",
  headers: { Authorization: \`Bearer \${process.env.KEY}\`, Accept: "image/png" },
  body: JSON.stringify(${JSON.stringify({ prompt })}),
});
if (!answer.ok) throw new Error(await answer.text());
await writeFile("picture.png", Buffer.from(await answer.arrayBuffer()));
` },
  { language: "JavaScript", client: "OpenAI", needs: NEEDS.openai_js, text: `import { writeFile } from "node:fs/promises";
${head_js(origin)}const answer = await client.images.generate({ model: "${model.id}", prompt: ${JSON.stringify(prompt)}, output_format: "png" });
await writeFile("picture.png", Buffer.from(answer.data[0].b64_json, "base64"));
` },
];
