// Runs before the first paint. It is a file because the page allows no inline script.
(() => {
  let kept = { getItem: () => null };
  try {
    kept = localStorage;
  } catch {
    // Storage may be switched off; the system's theme is used then.
  }
  // So that a chosen theme does not flash.
  const theme = kept.getItem("serve-app.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;

  // Modules of the frame and of the page that the address names are fetched side by side, not one after the other as they
  // are found; and who is signed in is asked meanwhile.
  const base = document.currentScript.src.replace(/js\/early\.js$/, "");
  const modules = JSON.parse(document.getElementById("modules").textContent);
  const token = kept.getItem("serve-app.csrf");
  const page = token ? location.hash.replace(/^#\/?/, "").split(/[/?]/)[0] : "";
  for (const name of [...modules[""], ...(page && modules[page] || [])]) {
    const link = document.createElement("link");
    link.rel = "modulepreload";
    link.href = base + name;
    document.head.append(link);
  }
  if (token) {
    const asked = fetch("/dashboard/session", { headers: { "x-csrf-token": token }, cache: "no-store" });
    asked.catch(() => {}); // whoever takes it hears of it
    globalThis.early = { token, asked };
  }
})();
