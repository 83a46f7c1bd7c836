// Icons: strokes on a grid of 24, drawn for this page.
import { html } from "../core/lib.js";

const PATHS = {
  overview: "M4 13h4l3-8 4 14 3-6h2",
  playground: "M5 5h14a1 1 0 0 1 1 1v9a1 1 0 0 1-1 1h-8l-4 4v-4H5a1 1 0 0 1-1-1V6a1 1 0 0 1 1-1z",
  models: "M12 3l8 4.5v9L12 21l-8-4.5v-9L12 3zM4 7.5l8 4.5 8-4.5M12 12v9",
  usage: "M5 20V11M12 20V4M19 20v-6",
  requests: "M5 6h14M5 12h14M5 18h9",
  batches: "M4 8l8-4 8 4-8 4-8-4zM4 12l8 4 8-4M4 16l8 4 8-4",
  queues: "M4 5h16v4H4zM4 12h11M4 17h11M18 11v7M15.5 15.5L18 18l2.5-2.5",
  webhooks: "M9 8a3 3 0 1 1 4 2.8l-2.5 4.4M8.5 13.5a3 3 0 1 0 2.9 3.7H16M14 11a3 3 0 1 1 1.5 5.6",
  adapters: "M14 4v4M10 4v4M7 8h10v4a5 5 0 0 1-10 0V8zM12 17v4",
  keys: "M14.5 9.5a4 4 0 1 1-1.2-2.8M13 13l0 0M12.6 11.7L4.5 19.8M7 17.5l2 2",
  cluster: "M5 4h14v6H5zM5 14h14v6H5zM8.5 7h.01M8.5 17h.01",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1 1M17.4 17.4l1 1M5.6 18.4l1-1M17.4 6.6l1-1",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  screen: "M4 5h16v11H4zM9 20h6",
  out: "M14 5H5v14h9M10 12h10M17 8.5l3.5 3.5-3.5 3.5",
  warn: "M12 4l9 16H3L12 4zM12 10v4.5M12 17.3v.01",
  info: "M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17zM12 11v5M12 8v.01",
  bad: "M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17zM12 8v5M12 16v.01",
  up: "M12 19V5M6 11l6-6 6 6",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  back: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  down: "M6 9l6 6 6-6",
  sortUp: "M7 14l5-5 5 5",
  sortDown: "M7 10l5 5 5-5",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  edit: "M4 20l1-4L16 5l3 3L8 19l-4 1z",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  refresh: "M19 12a7 7 0 1 1-2-5M19 4v4h-4",
  search: "M10.5 4a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM15.5 15.5L20 20",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  play: "M8 5l11 7-11 7z",
  spinner: "M12 4a8 8 0 1 0 8 8",
  compare: "M4 5h6v14H4zM14 5h6v14h-6z",
};

/** @param {{name: keyof typeof PATHS, size?: number, class?: string}} props  decoration only: give the text beside it */
export const Icon = ({ name, size = 18, class: className }) => html`
  <svg class=${className} width=${size} height=${size} viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.8"
    stroke-linecap="round" stroke-linejoin="round" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>`;

export const Mark = () => html`
  <svg viewBox="0 0 32 32" aria-hidden="true" focusable="false"><rect width="32" height="32" rx="8" fill="#4f46c8" />
    <path d="M9 20.5c0-2.2 1.8-3.2 4-3.6l6-1.1c1.6-.3 3-1 3-2.6 0-1.9-1.6-3.2-3.6-3.2H12M9 24h10" fill="none" stroke="#fff"
      stroke-width="2.8" stroke-linecap="round" /></svg>`;
