// What code of several clients has in common.

/** JSON in a shell's single quotes. */
export const quoted = (value) => `'${JSON.stringify(value).replaceAll("'", "'\\''")}'`;

/** JSON as Python writes it. */
export function python(value) {
  if (value === null) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

export const NEEDS = {
  httpx: "pip install httpx", cloudflare: "pip install cloudflare", openai: "pip install openai", anthropic: "pip install anthropic", langchain: "pip install langchain-openai",
  cloudflare_js: "npm install cloudflare", openai_js: "npm install openai", anthropic_js: "npm install @anthropic-ai/sdk", langchain_js: "npm install @langchain/openai @langchain/core",
  ai: "npm install ai @ai-sdk/openai-compatible",
};
