// The chat: one or two columns of messages, and one place to write.
import { classes, html, useEffect, useLayoutEffect, useRef, useState } from "../core/lib.js";
import { asOptions, yes } from "../core/catalog.js";
import { Button, Segments, Select, TextArea } from "../ui/controls.js";
import { toastError } from "../ui/toast.js";
import { Icon } from "../ui/icons.js";
import { answer, body } from "./chat.js";
import { busy, state } from "./lanes.js";
import { AnswerView } from "./answer_view.js";
import { Picture, Shown } from "./picture.js";
import { SettingsPanel } from "./settings_panel.js";

const IDEAS = ["What does math.sqrt do?", "What does itertools.chain do?", "What does os.path.join do?"];
const OF_PICTURES = ["What is in the picture?", "How many things are there?"];

/** @param {{list: Object[], choose: Function, changed: () => void}} props  the models that chat, and what to call after a change */
export function Chat({ list, choose, changed }) {
  // Tokens come faster than a screen can show: at most one drawing for each of its frames.
  const frame = useRef(0);
  const soon = () => { frame.current ||= requestAnimationFrame(() => { frame.current = 0; changed(); }); };
  useEffect(() => () => { cancelAnimationFrame(frame.current); }, []);

  const all = (property) => state.lanes.every((lane) => yes(list.find((one) => one.id === lane.model)?.properties[property]));
  const sees = all("vision");
  const hears = all("hearing");
  const run = (lane) => answer(lane, soon).catch(toastError);
  const ask = (text) => {
    if (!text.trim() || busy()) return;
    try {
      state.lanes.forEach(body);
    } catch (error) {
      // What is typed stays until the settings are mended.
      toastError(error);
      return;
    }
    const picture = sees || hears ? state.picture : "";
    state.draft = state.picture = "";
    for (const lane of state.lanes) {
      lane.messages.push({ role: "user", content: text, picture });
      run(lane);
    }
    changed();
  };
  const again = (lane) => {
    while (lane.messages.length && lane.messages.at(-1).role === "assistant") lane.messages.pop();
    run(lane);
  };
  const result = (lane, call, content) => {
    lane.messages.push({ role: "tool", tool_call_id: call.id, name: call.name, content });
    const told = new Set(lane.messages.filter((one) => one.role === "tool").map((one) => one.tool_call_id));
    const caller = lane.messages.findLast((one) => one.calls?.length);
    if (caller.calls.every((one) => told.has(one.id))) run(lane);
    changed();
  };
  const two = state.lanes.length === 2;
  const edited = state.lanes[state.edited] ?? state.lanes[0];
  return html`<div class="split playground">
    <div class="talk">
      <div class=${classes("lanes", two && "lanes-two")}>${state.lanes.map((lane, at) => html`<section class="lane" key=${lane.id} aria-label=${two ? `Conversation ${at + 1}` : "Conversation"}>
        ${two && html`<div class="lane-head"><${Select} label=${`Model ${at + 1}`} hideLabel value=${lane.model} options=${asOptions(list)} onInput=${choose(lane)} /></div>`}
        <${Messages} lane=${lane} ideas=${sees && state.picture ? OF_PICTURES : IDEAS} ask=${ask} again=${() => again(lane)} result=${(call, text) => result(lane, call, text)} />
      </section>`)}</div>
      <${Composer} ask=${ask} changed=${changed} sees=${sees} hears=${hears} />
    </div>
    <aside class="card settings" aria-label="Settings"><details open=${matchMedia("(min-width: 60rem)").matches}>
      <summary><h2>Settings</h2><${Icon} name="down" size="16" /></summary>
      <div class="card-body stack">
        ${two && html`<${Segments} label="Settings of" value=${String(state.edited)} options=${[{ value: "0", label: "Left" }, { value: "1", label: "Right" }]}
          onInput=${(value) => { state.edited = Number(value); changed(); }} />`}
        <${SettingsPanel} key=${edited.id} lane=${edited} model=${list.find((one) => one.id === edited.model)} changed=${changed} />
      </div></details></aside>
  </div>`;
}

function Messages({ lane, ideas, ask, again, result }) {
  const box = useRef(null);
  const near = useRef(true);
  const length = lane.messages.reduce((sum, one) => sum + one.content.length + (one.reasoning?.length ?? 0) + 1, 0);
  // Follows the answer, unless somebody has scrolled up to read.
  useLayoutEffect(() => { if (near.current && box.current) box.current.scrollTop = box.current.scrollHeight; }, [length]);
  const scrolled = () => { near.current = box.current.scrollHeight - box.current.scrollTop - box.current.clientHeight < 60; };
  if (!lane.messages.length) {
    return html`<div class="messages messages-empty"><div class="empty"><${Icon} name="playground" /><h3>Ask something</h3>
      <p>The answer streams in, with its time, tokens and cost beside it.</p>
      <div class="ideas">${ideas.map((text) => html`<button type="button" class="button" key=${text} onClick=${() => ask(text)}>${text}</button>`)}</div></div></div>`;
  }
  const last = lane.messages.length - 1;
  return html`<div class="messages" ref=${box} onScroll=${scrolled} role="log" aria-label="Messages" tabindex="0" aria-busy=${lane.controller ? "true" : "false"}>
    ${lane.messages.map((one, at) => html`<article key=${at} class=${`message message-${one.role}`}>
      <h3 class="message-who">${one.role === "user" ? "You" : one.role === "tool" ? `Result of ${one.name}` : lane.model.replace(/^@cf\//, "")}</h3>
      ${one.role === "assistant"
        ? html`<${AnswerView} message=${one} last=${at === last} again=${again} result=${result} told=${lane.messages} />`
        : html`<div class="said">${one.picture && html`<${Shown} url=${one.picture} tense="that was sent" />`}${one.content}</div>`}
    </article>`)}</div>`;
}

function Composer({ ask, changed, sees, hears }) {
  const running = busy();
  const area = useRef(null);
  const [height, setHeight] = useState(0);
  useLayoutEffect(() => {
    const box = area.current?.querySelector("textarea");
    if (!box) return;
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, 240)}px`;
    setHeight(box.scrollHeight);
  }, [state.draft, height]);
  const press = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask(state.draft);
  };
  return html`<form class="composer" ref=${area} onSubmit=${(event) => { event.preventDefault(); ask(state.draft); }}>
    ${(sees || hears) && html`<${Picture} picture=${state.picture} sees=${sees} hears=${hears} set=${(url) => { state.picture = url; changed(); }} />`}
    <${TextArea} label="Message" hideLabel rows="1" placeholder="Ask something" value=${state.draft} onInput=${(text) => { state.draft = text; changed(); }} onKeyDown=${press} />
    ${running
      ? html`<${Button} icon="stop" label="Stop" onClick=${() => state.lanes.forEach((lane) => lane.controller?.abort())} />`
      : html`<${Button} main type="submit" icon="send" label="Send" disabled=${!state.draft.trim()} />`}
  </form>`;
}
