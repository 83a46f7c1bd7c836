// Light, dark, or as the system has it.
const KEY = "serve-app.theme";

export const theme = () => document.documentElement.dataset.theme ?? "system";

export function setTheme(name) {
  if (name === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem(KEY);
  } else {
    document.documentElement.dataset.theme = name;
    localStorage.setItem(KEY, name);
  }
  dispatchEvent(new Event("themechange"));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));

/** The colour that a custom property has now, for what is drawn on a canvas. */
export function colour(property) {
  const probe = document.createElement("span");
  probe.hidden = true;
  probe.style.color = `var(${property})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
