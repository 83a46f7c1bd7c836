// Units of the ledger in words.
import { count, ms } from "../core/format.js";

const WORDS = {
  input_tokens: (value) => `${count(value)} input tokens`, cached_tokens: (value) => `${count(value)} of them cached`, output_tokens: (value) => `${count(value)} output tokens`,
  images: (value) => `${count(value)} ${value === 1 ? "picture" : "pictures"}`, audio_ms: (value) => `${ms(value)} of sound`, streamed_audio_ms: (value) => `${ms(value)} of streamed sound`,
  characters: (value) => `${count(value)} characters`,
};
const TOKENS = ["input_tokens", "cached_tokens", "output_tokens"];

const words = (names, units) => names.filter((name) => units[name]).map((name) => (WORDS[name] ?? ((value) => `${count(value)} ${name.replaceAll("_", " ")}`))(units[name]));

/** All units, tokens first. @param {Object<string, number>} units @returns {string[]} */
export const unitWords = (units) => words([...TOKENS, ...Object.keys(units).filter((name) => !TOKENS.includes(name))], units);

/** Those that are no tokens. */
export const otherUnits = (units) => words(Object.keys(units).filter((name) => !TOKENS.includes(name)), units);
