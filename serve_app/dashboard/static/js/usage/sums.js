// Sums of rows of GET .../ai/usage. Money is added as whole billionths and neurons as whole millionths, which is how the
// ledger rounds them, so that a sum here is the sum there.

const MICRO = 1e6;

/** All of several rows in one. */
export function add(rows) {
  const sum = { requests: 0, seconds: 0, neurons: 0, units: {} };
  let micro = 0;
  for (const row of rows) {
    sum.requests += row.requests;
    sum.seconds += row.seconds;
    micro += Math.round(Number(row.neurons) * MICRO);
    for (const [unit, value] of Object.entries(row.units)) sum.units[unit] = (sum.units[unit] ?? 0) + value;
  }
  sum.neurons = micro / MICRO;
  return sum;
}

const nano = (amount) => {
  const [whole, part = ""] = String(amount).split(".");
  return BigInt(whole) * 1_000_000_000n + BigInt(part.padEnd(9, "0").slice(0, 9));
};

/** The money of several rows, by currency. @returns {{amount: string, currency: string}[]} */
export function costs(rows) {
  const sums = new Map();
  for (const { cost } of rows) if (cost) sums.set(cost.currency, (sums.get(cost.currency) ?? 0n) + nano(cost.amount));
  return [...sums].map(([currency, value]) => ({ currency, amount: `${value / 1_000_000_000n}.${String(value % 1_000_000_000n).padStart(9, "0")}` }));
}

/** Rows by the value of a field, the largest first. */
export function groups(rows, field, value) {
  const found = new Map();
  for (const row of rows) {
    const name = row[field] ?? "";
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(row);
  }
  const total = (list) => list.reduce((sum, row) => sum + value(row), 0);
  return [...found].map(([name, list]) => ({ name, rows: list, sum: add(list), total: total(list) })).sort((one, other) => other.total - one.total);
}

/** The beginnings of all intervals between the bounds of an answer, in unix seconds. */
export function starts(info, interval) {
  const at = new Date(info.since);
  at.setUTCMinutes(0, 0, 0);
  if (interval !== "hour") at.setUTCHours(0);
  if (interval === "month") at.setUTCDate(1);
  const found = [];
  for (const end = new Date(info.until); at < end && found.length < 1000;) {
    found.push(at.getTime() / 1000);
    if (interval === "hour") at.setUTCHours(at.getUTCHours() + 1);
    else if (interval === "day") at.setUTCDate(at.getUTCDate() + 1);
    else at.setUTCMonth(at.getUTCMonth() + 1);
  }
  return found;
}

/** One value for each of `times`, zero where there is no row. */
export function byTime(rows, times, value) {
  const sums = new Map(times.map((time) => [time, 0]));
  for (const row of rows) {
    const time = new Date(row.time).getTime() / 1000;
    sums.set(time, (sums.get(time) ?? 0) + value(row));
  }
  return times.map((time) => sums.get(time));
}
