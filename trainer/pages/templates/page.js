// What the reader does on the page.

const chartAt = (event) => (event.target.tagName === "CANVAS" ? charts.get(event.target.closest("figure")) : undefined);

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.x) {
    choice.x = button.dataset.x;
    choice.zooms.delete("curves");
  } else if (button.dataset.run) {
    const run = Number(button.dataset.run);
    if (!choice.hidden.delete(run)) choice.hidden.add(run);
    moveCursors(null);
  } else if (button.id === "reset") choice.zooms.delete("curves");
  else if (button.id === "theme") return theme();
  else if (button.dataset.copy !== undefined) return copy(button);
  else return;
  drawCurves();
});

document.addEventListener("dblclick", (event) => {
  const one = chartAt(event);
  if (one && choice.zooms.delete(one.key)) one.redraw(event.target.closest("figure"));
});

document.addEventListener("pointermove", (event) => {
  const one = chartAt(event);
  if (one?.key !== "curves") return;
  const [found] = areMany() ? one.chart.getElementsAtEventForMode(event, "nearest", { intersect: false }, true) : [];
  moveCursors(one.chart.scales.x.getValueForPixel(event.offsetX), found && one.chart.data.datasets[found.datasetIndex].run);
});

for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, (event) => {
  const button = event.target.closest("[data-run]");
  if (button && areMany()) moveCursors(null, Number(button.dataset.run));
});

for (const kind of ["pointerout", "focusout"]) document.addEventListener(kind, (event) => {
  const one = chartAt(event);
  if (one) one.at = one.go(null) ?? null;
  else if (event.target.closest("[data-run]")) moveCursors(null);
});

document.addEventListener("keydown", (event) => {
  const one = chartAt(event), far = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
  if (far === undefined || !one?.stops.length) return;
  event.preventDefault();
  one.at = Math.max(0, Math.min(one.stops.length - 1, (one.at ?? (far > 0 ? -1 : one.stops.length)) + far));
  one.go(one.stops[one.at]);
});

document.addEventListener("input", (event) => {
  if (event.target.id === "smooth") {
    choice.smooth = Number(event.target.value);
    drawCurves();
  } else if (event.target.id === "find") {
    const wanted = event.target.value.toLowerCase();
    for (const row of document.querySelectorAll("#all-settings div")) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  }
});

function copy(button) {
  const text = button.parentElement.querySelector("pre").textContent;
  navigator.clipboard?.writeText(text).then(() => { button.textContent = "copied"; }, () => {});
}

const dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  const root = document.documentElement, now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* a page from a file may have no storage */ }
  draw();
}
try { const kept = localStorage.getItem("theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* the same */ }

dark.addEventListener("change", draw);
draw();
