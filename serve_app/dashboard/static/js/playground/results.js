// Answers of tasks, by what they are made of: labels with scores, boxes on a picture, a transcript, texts; and as JSON.
import { saveAs } from "../core/api.js";
import { count } from "../core/format.js";
import { html, useEffect, useRef, useState } from "../core/lib.js";
import { Code, CopyButton } from "../ui/code.js";
import { Button } from "../ui/controls.js";
import { Meter } from "../ui/states.js";

/** @typedef {{url: string, type: string, name?: string}} Media */

// What is longer than anybody reads is shown in part.
const LONG = 2000;
const short = (name, value) => (typeof value === "string" && value.length > LONG ? `${value.slice(0, 80)}… (${count(value.length)} characters)` : value);

/** @param {{result: any, files: Object<string, Media>}} props  `files`: what was sent, by field */
export function Result({ result, files }) {
  const shown = view(result, files);
  const json = html`<${Code} label="Answer as JSON" text=${JSON.stringify(result, short, 2)} />`;
  return shown ? html`${shown}<details class="folded"><summary>As JSON</summary>${json}</details>` : json;
}

function view(result, files) {
  const labelled = Array.isArray(result) && result.every((one) => typeof one?.label === "string" && typeof one.score === "number");
  if (labelled && files.image && result.every((one) => one.box)) return html`<${Boxes} list=${result} picture=${files.image} />`;
  if (labelled && result.length) return html`<${Labels} list=${result} />`;
  if (typeof result?.text === "string" && result.vtt !== undefined) return html`<${Transcript} told=${result} sound=${files.audio} />`;
  if (typeof result?.audio === "string") return html`<${Sound} coded=${result.audio} />`;
  if (typeof result?.image === "string") return html`<${Picture} coded=${result.image} seed=${result.seed} />`;
  const texts = result?.translations ?? [result?.translated_text ?? result?.summary ?? result?.description].filter((one) => typeof one === "string");
  return texts.length ? html`<${Texts} texts=${texts} />` : null;
}

export function Media({ media }) {
  if (media.type.startsWith("image/")) return html`<img class="media" src=${media.url} alt=${media.name ?? ""} />`;
  if (/^(audio|video)\//.test(media.type)) return html`<audio class="media" controls src=${media.url} aria-label=${media.name ?? "Sound"}></audio>`;
  return html`<p><a href=${media.url} download="answer">Save the file</a></p>`;
}

const Labels = ({ list, kinds }) => html`<ol class="ranked" aria-label="Labels">${list.map((one, at) => html`<li key=${at}>
  <div class="between"><span class="wrap">${kinds && html`<span class=${`swatch swatch-${kinds(one.label)}`} aria-hidden="true"></span> ${at + 1} `}${one.label}</span><strong class="num">${one.score.toFixed(4)}</strong></div>
  <${Meter} plain share=${one.score} label=${`Score of ${one.label}`} /></li>`)}</ol>`;

/** Boxes are in pixels of the picture that was sent. */
function Boxes({ list, picture }) {
  const [size, setSize] = useState(null);
  const names = [...new Set(list.map((one) => one.label))];
  const kinds = (label) => 1 + (names.indexOf(label) % 6);
  const measure = ({ currentTarget: image }) => setSize({ width: image.naturalWidth, height: image.naturalHeight });
  const letter = size && Math.max(size.width, size.height) / 20;
  return html`<div class="boxes"><img src=${picture.url} alt="The picture that was sent" onLoad=${measure} />
    ${size && html`<svg viewBox=${`0 0 ${size.width} ${size.height}`} aria-hidden="true">${list.map(({ label, box }, at) => html`<g key=${at} class=${`box box-${kinds(label)}`}>
      <rect x=${box.xmin} y=${box.ymin} width=${box.xmax - box.xmin} height=${box.ymax - box.ymin} />
      <text x=${box.xmin + letter / 5} y=${box.ymin + letter} font-size=${letter}>${at + 1}</text></g>`)}</svg>`}</div>
    ${list.length ? html`<${Labels} list=${list} kinds=${kinds} />` : html`<p>Nothing was found that is likely enough.</p>`}`;
}

// Formats of pictures by the first characters of their base64.
const PICTURES = [["/9j/", "image/jpeg", "jpg"], ["UklGR", "image/webp", "webp"], ["", "image/png", "png"]];

/** A picture that came as base64. */
function Picture({ coded, seed }) {
  const [, type, ending] = PICTURES.find(([begins]) => coded.startsWith(begins));
  const save = () => saveAs(new Blob([Uint8Array.from(atob(coded), (one) => one.charCodeAt(0))], { type }), `picture.${ending}`);
  return html`<img class="media" src=${`data:${type};base64,${coded}`} alt="The model's picture" />
    <div class="row"><${Button} small icon="download" onClick=${save}>Save the picture<//>${seed !== undefined && html`<span class="hint">Seed ${String(seed)}</span>`}</div>`;
}

// Formats of sound by their first bytes.
const SOUNDS = [["RIFF", "audio/wav", "wav"], ["fLaC", "audio/flac", "flac"], ["OggS", "audio/ogg", "ogg"], ["ID3", "audio/mpeg", "mp3"], ["\xff\xf1", "audio/aac", "aac"], ["\xff", "audio/mpeg", "mp3"]];

/** A sound that came as base64. */
function Sound({ coded }) {
  const [made, setMade] = useState(null);
  useEffect(() => {
    const raw = atob(coded);
    const [, type, ending] = SOUNDS.find(([begins]) => raw.startsWith(begins)) ?? ["", "application/octet-stream", "pcm"];
    const blob = new Blob([Uint8Array.from(raw, (one) => one.charCodeAt(0))], { type });
    const url = URL.createObjectURL(blob);
    setMade({ blob, url, type, ending, name: "The sound that was made" });
    return () => URL.revokeObjectURL(url);
  }, [coded]);
  return made && html`<${Media} media=${made} /><div><${Button} small icon="download" onClick=${() => saveAs(made.blob, `speech.${made.ending}`)}>Save the sound<//></div>`;
}

function Transcript({ told, sound }) {
  const player = useRef(null);
  const info = told.transcription_info ?? {};
  const segments = told.segments ?? [];
  const play = (from) => {
    player.current.currentTime = from;
    player.current.play();
  };
  return html`${sound && html`<audio class="media" controls src=${sound.url} ref=${player} aria-label="The sound that was sent"></audio>`}
    <p class="said">${told.text || "Nothing was said."}</p>
    <p class="hint">${[info.language, info.duration !== undefined && `${info.duration.toFixed(1)} s`, `${told.word_count} words`].filter(Boolean).join(", ")}</p>
    ${segments.length > 0 && html`<ol class="segments-list" aria-label="When it was said">${segments.map((one, at) => html`<li key=${at}>
      ${sound ? html`<${Button} small quiet icon="play" label=${`Play from ${clock(one.start)}`} onClick=${() => play(one.start)} />` : null}
      <span class="num muted">${clock(one.start)} to ${clock(one.end)}</span> <span class="wrap">${one.text}</span></li>`)}</ol>`}
    <div class="row"><${CopyButton} text=${told.text} label="Copy text" />
      <${Button} small onClick=${() => saveAs(new Blob([told.vtt], { type: "text/vtt" }), "transcript.vtt")}>Save subtitles<//></div>`;
}

const clock = (seconds) => `${Math.floor(seconds / 60)}:${(seconds % 60).toFixed(1).padStart(4, "0")}`;

const Texts = ({ texts }) => html`<div class="stack">${texts.map((text, at) => html`<div key=${at} class="between"><p class="said">${text}</p><${CopyButton} text=${text} label="Copy text" quiet /></div>`)}</div>`;
