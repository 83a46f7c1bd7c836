// A picture or sound for the next message: chosen, shown, and taken away again.
import { html, newId, useState } from "../core/lib.js";
import { Button } from "../ui/controls.js";
import { Icon } from "../ui/icons.js";

/** A user's message as the API takes it. */
export const said = ({ content, picture }) => (picture ? [part(picture), { type: "text", text: content }] : content);

const isSound = (url) => /^data:(audio|video)\//.test(url);
const part = (url) => (isSound(url) ? { type: "input_audio", input_audio: { data: url, format: url.slice(url.indexOf("/") + 1, url.indexOf(";")) } } : { type: "image_url", image_url: { url } });

/** What goes along with a message. @param {{url: string, tense: string}} props */
export const Shown = ({ url, tense }) => (isSound(url) ? html`<p class="hint">A sound ${tense}</p>` : html`<img src=${url} alt=${`The picture ${tense}`} />`);

/** @param {{picture: string, sees: boolean, hears: boolean, set: (url: string) => void}} props  a data URL, "" for none; what the models take */
export function Picture({ picture, sees, hears, set }) {
  const [id] = useState(() => newId("picture"));
  const take = ([file]) => {
    if (!file) return;
    const reader = new FileReader();
    reader.onload = () => set(reader.result);
    reader.readAsDataURL(file);
  };
  if (picture) {
    return html`<div class="composer-picture row"><${Shown} url=${picture} tense="to send" />
      <${Button} small quiet icon="close" label=${isSound(picture) ? "Take the sound away" : "Take the picture away"} onClick=${() => set("")} /></div>`;
  }
  return html`<div class="composer-picture row"><label class="button button-quiet button-small" for=${id}><${Icon} name="upload" size="15" />Add a ${sees && hears ? "picture or sound" : sees ? "picture" : "sound"}</label>
    <input id=${id} class="hidden-input" type="file" accept=${[sees && "image/*", hears && "audio/*"].filter(Boolean).join(",")} onChange=${(event) => { take(event.currentTarget.files); event.currentTarget.value = ""; }} /></div>`;
}
