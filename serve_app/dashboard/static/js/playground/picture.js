// A picture for the next message: chosen, shown, and taken away again.
import { html, newId, useState } from "../core/lib.js";
import { Button } from "../ui/controls.js";
import { Icon } from "../ui/icons.js";

/** A user's message as the API takes it. */
export const said = ({ content, picture }) => (picture ? [{ type: "image_url", image_url: { url: picture } }, { type: "text", text: content }] : content);

/** @param {{picture: string, set: (url: string) => void}} props  a data URL, "" for none */
export function Picture({ picture, set }) {
  const [id] = useState(() => newId("picture"));
  const take = ([file]) => {
    if (!file) return;
    const reader = new FileReader();
    reader.onload = () => set(reader.result);
    reader.readAsDataURL(file);
  };
  if (picture) {
    return html`<div class="composer-picture row"><img src=${picture} alt="The picture to send" />
      <${Button} small quiet icon="close" label="Take the picture away" onClick=${() => set("")} /></div>`;
  }
  return html`<div class="composer-picture row"><label class="button button-quiet button-small" for=${id}><${Icon} name="upload" size="15" />Add a picture</label>
    <input id=${id} class="hidden-input" type="file" accept="image/*" onChange=${(event) => { take(event.currentTarget.files); event.currentTarget.value = ""; }} /></div>`;
}
