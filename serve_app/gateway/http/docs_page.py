"""The page at /docs, with nothing in it from elsewhere. It reads /openapi.json and sends requests to this server.

``NONCE`` stands for the value of the page's Content-Security-Policy. Text goes into the page as text, never as HTML.
"""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>serve-app API</title>
<style nonce="NONCE">
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
  h2 { margin: 2rem 0 .5rem; font-size: 1.1rem; }
  details { border: 1px solid #ddd; border-radius: 4px; margin: .3rem 0; padding: .3rem .7rem; }
  summary { cursor: pointer; overflow-wrap: anywhere; }
  code, pre, textarea, input { font: 13px/1.4 ui-monospace, monospace; }
  textarea { width: 100%; height: 9rem; box-sizing: border-box; }
  input { width: 100%; box-sizing: border-box; }
  pre { background: #f6f6f6; padding: .6rem; overflow: auto; max-height: 24rem; white-space: pre-wrap; }
  .method { display: inline-block; width: 4.5rem; font-weight: 600; }
  label { display: block; margin: .4rem 0; }
  @media (prefers-color-scheme: dark) {
    body { background: #181818; color: #ddd; } details { border-color: #444; } pre { background: #222; }
    textarea, input { background: #222; color: #ddd; border: 1px solid #555; }
  }
</style>
<h1>serve-app API</h1>
<p>Every route but those of the server itself asks for the API key. <a href="/openapi.json">openapi.json</a> is the same
for machines. What is typed here stays in this page.</p>
<label>API key <input id="key" type="password" autocomplete="off"></label>
<label>Account <input id="account"></label>
<div id="routes">Loading ...</div>
<script nonce="NONCE">
"use strict";
const make = (tag, text, parent) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const field = (parent, name, value) => {
  const input = make("input", undefined, make("label", name + " ", parent));
  input.value = value;
  return input;
};
async function send(button, output, method, path, query, body) {
  button.disabled = true;
  output.textContent = "";
  const started = performance.now();
  try {
    const headers = {"Content-Type": "application/json"};
    const key = document.getElementById("key").value;
    if (key) headers.Authorization = "Bearer " + key;
    const answer = await fetch(path + (query ? "?" + query : ""), {method, headers, body});
    const lines = [answer.status + " after " + Math.round(performance.now() - started) + " ms to the headers",
                   "cf-ray: " + answer.headers.get("cf-ray"), ""];
    output.textContent = lines.join("\\n");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      text += value;
      output.textContent = lines.join("\\n") + text;
    }
    try { output.textContent = lines.join("\\n") + JSON.stringify(JSON.parse(text), null, 2); } catch { /* events */ }
  } catch (error) {
    output.textContent = String(error);
  }
  button.disabled = false;
}
function show(parent, path, method, about) {
  const box = make("details", undefined, parent);
  const head = make("summary", undefined, box);
  make("span", method.toUpperCase(), head).className = "method";
  make("code", path, head);
  make("span", " \\u2014 " + about.summary, head);
  const inputs = {};
  const defaults = {model: "@cf/pico/pico-instruct", gateway: "default"};
  for (const one of about.parameters)
    if (one.name !== "account")
      inputs[one.name] = [one.in, field(box, one.name, one.in === "path" ? defaults[one.name] || "" : "")];
  const media = about.requestBody && about.requestBody.content["application/json"];
  let text;
  if (media) {
    text = make("textarea", undefined, box);
    text.value = JSON.stringify(media.example || {}, null, 2);
  }
  const button = make("button", "Send", box);
  const output = make("pre", "", box);
  button.addEventListener("click", () => {
    const query = new URLSearchParams();
    let target = path.replace("{account}", encodeURIComponent(document.getElementById("account").value));
    for (const [name, [where, input]] of Object.entries(inputs)) {
      if (where === "path") target = target.replace("{" + name + "}", encodeURIComponent(input.value));
      else if (input.value) query.set(name, input.value);
    }
    send(button, output, method.toUpperCase(), target, query.toString(), text && text.value);
  });
  if (media) {
    const schema = make("details", undefined, box);
    make("summary", "Schema of the body", schema);
    make("pre", JSON.stringify(media.schema, null, 2), schema);
  }
}
fetch("/openapi.json").then(answer => answer.json()).then(api => {
  const parameters = Object.values(api.paths).flatMap(path => Object.values(path)).flatMap(about => about.parameters);
  document.getElementById("account").value = parameters.find(one => one.name === "account").schema.enum[0];
  const routes = document.getElementById("routes");
  routes.textContent = "";
  const groups = {};
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, about] of Object.entries(methods)) {
      const tag = about.tags[0];
      if (!groups[tag]) { groups[tag] = make("section", undefined, routes); make("h2", tag, groups[tag]); }
      show(groups[tag], path, method, about);
    }
});
</script>
</html>
"""
