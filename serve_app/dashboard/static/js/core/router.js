// The address after the # names the page: #/models/@cf/pico/pico-instruct?tab=code. It survives a reload and can be shared.
import { useEffect, useState } from "./lib.js";

/**
 * @typedef {Object} Place
 * @property {string} page  the first part, such as "models"
 * @property {string} rest  what follows, such as a model's id
 * @property {Object<string, string>} query
 */

/** @returns {Place} */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?");
  const [page, ...rest] = path.split("/").map(decode);
  return { page, rest: rest.join("/"), query: Object.fromEntries(new URLSearchParams(search)) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** The address of a page. Slashes and @ of a model's id stay readable. */
export function link(page, rest = "", query = {}) {
  const path = rest ? `/${rest.split("/").map((part) => encodeURIComponent(part).replaceAll("%40", "@")).join("/")}` : "";
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value != null)).toString();
  return `#/${page}${path}${search ? `?${search}` : ""}`;
}

export const go = (page, rest, query) => { location.hash = link(page, rest, query); };

/** Changes the query of the current page without a new entry in the history. */
export function setQuery(changes) {
  const { page, rest, query } = parse(location.hash);
  history.replaceState(null, "", link(page, rest, { ...query, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** @returns {Place} */
export function usePlace() {
  const [place, setPlace] = useState(() => parse(location.hash));
  useEffect(() => {
    const changed = () => setPlace(parse(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return place;
}
