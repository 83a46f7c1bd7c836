// Rows of GET /v1/metrics/history as series with a value for every step.

/**
 * @param {Object[]} rows  each with `time`, the beginning of a step in unix seconds
 * @returns {{times: number[], of: (value: (row: Object) => number|null, missing?: number|null) => (number|null)[]}}
 *   `of` gives the values of all times, and `missing` where nothing happened
 */
export function series(rows, since, until, step) {
  const times = [];
  for (let time = Math.floor(since / step) * step; time <= until; time += step) times.push(time);
  const found = new Map(rows.map((row) => [Math.floor(row.time / step) * step, row]));
  return { times, of: (value, missing = 0) => times.map((time) => (found.has(time) ? value(found.get(time)) : missing)) };
}
