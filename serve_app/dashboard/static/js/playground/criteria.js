// Kinds of questions, and what their answers mean: typed as one on each line.

export const KINDS = {
  noul: { label: "Yes or no" },
  choice: { label: "Choice", criteria: "Options", hint: "One on each line; after a colon what it means" },
  score: { label: "Score", criteria: "Levels", hint: "One on each line, the lowest first" },
};

/** The part of a question that says what its answers mean; nothing where nothing has to be said. */
export function criteria(type, text) {
  const lines = text.split("\n").map((one) => one.trim()).filter(Boolean);
  if (type === "score") return { criteria: lines };
  if (type !== "choice") return {};
  return { criteria: Object.fromEntries(lines.map((line) => {
    const [name, ...about] = line.split(":");
    return [name.trim(), about.join(":").trim() || null];
  })) };
}
