// Numbers and times as people read them. What has a unit is shown with it.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
const NONE = "–";

const missing = (value) => value === null || value === undefined || Number.isNaN(value);
const digits = (value, most) => new Intl.NumberFormat("en-US", { maximumFractionDigits: most }).format(value);

export const count = (value) => (missing(value) ? NONE : whole.format(value));
export const compact = (value) => (missing(value) ? NONE : Math.abs(value) < 10_000 ? digits(value, 1) : short.format(value));
export const percent = (share, most = 0) => (missing(share) ? NONE : share > 0 && share < 0.0005 ? "< 0.1 %" : `${digits(share * 100, most)} %`);
export const rate = (value) => (missing(value) ? NONE : digits(value, value < 0.1 ? 3 : value < 10 ? 2 : value < 100 ? 1 : 0));

/** Milliseconds, as ms, s or min. */
export function ms(value) {
  if (missing(value)) return NONE;
  if (value < 1) return `${digits(value, 2)} ms`;
  if (value < 1000) return `${digits(value, value < 10 ? 1 : 0)} ms`;
  if (value < 60_000) return `${digits(value / 1000, value < 10_000 ? 2 : 1)} s`;
  return `${digits(value / 60_000, 1)} min`;
}

export const seconds = (value) => (missing(value) ? NONE : ms(value * 1000));

/** A length of time for people: 3 h 20 min. */
export function span(value) {
  if (missing(value)) return NONE;
  if (value < 60) return `${digits(value, value < 10 ? 1 : 0)} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${digits(value / 86_400, 1)} days`;
}

export function bytes(value) {
  if (missing(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${digits(value, value < 10 && at ? 1 : 0)} ${units[at]}`;
}

/** Neurons with all digits that the ledger has. */
export const neurons = (value) => (missing(value) ? NONE : digits(Number(value), 6));

const SIGNS = { USD: "$", EUR: "€", GBP: "£" };

/** Money as the ledger has it: every digit, only zeros at the end left out. @param {{amount: string, currency: string}|null} cost */
export function money(cost) {
  if (!cost || missing(cost.amount)) return NONE;
  const [before, after = ""] = String(cost.amount).split(".");
  const kept = after.replace(/0+$/, "").padEnd(2, "0");
  const grouped = before.replace(/\B(?=(\d{3})+$)/g, ",");
  const sign = SIGNS[cost.currency];
  return sign ? `${sign}${grouped}.${kept}` : `${grouped}.${kept} ${cost.currency}`;
}

/** How the beginning of a step of so many seconds is written. */
export const stepped = (step) => (step >= 27 * 86_400 ? month : step >= 86_400 ? date : dateTime);

/** A moment in unix seconds, or as text, as a Date. */
export const moment = (value) => new Date(typeof value === "number" ? value * 1000 : value);

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
// Days and months are those of UTC, as the ledger's are; times of day are those of who looks.
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric", timeZone: "UTC" });
const ofYear = new Intl.DateTimeFormat("en-GB", { month: "long", year: "numeric", timeZone: "UTC" });
const both = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

export const time = (value) => (missing(value) || value === "" ? NONE : clock.format(moment(value)));
export const date = (value) => (missing(value) || value === "" ? NONE : day.format(moment(value)));
export const month = (value) => (missing(value) || value === "" ? NONE : ofYear.format(moment(value)));
export const dateTime = (value) => (missing(value) || value === "" ? NONE : both.format(moment(value)));

export function ago(value) {
  if (missing(value) || value === "") return "never";
  const past = (Date.now() - moment(value).getTime()) / 1000;
  return past < 5 ? "just now" : past < 0 ? `in ${span(-past)}` : `${span(past)} ago`;
}

/** A model's id without what most have in common. */
export const shortModel = (id) => String(id ?? "").replace(/^@(cf|hf)\//, "");
