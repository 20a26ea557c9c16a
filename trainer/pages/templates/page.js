// Puts the plots into the page, and takes up what is new of runs that go on.

function draw() {
  drawCurves();
  document.querySelectorAll("figure[data-timeline]").forEach(drawTimeline);
  document.querySelectorAll("figure[data-roofline]").forEach(drawRoofline);
  document.querySelectorAll("figure[data-search]").forEach(drawSearch);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.x) [choice.x, choice.zoom] = [button.dataset.x, null];
  else if (button.dataset.run) {
    const run = Number(button.dataset.run);
    if (!choice.hidden.delete(run)) choice.hidden.add(run);
  } else if (button.id === "reset") choice.zoom = null;
  else if (button.id === "theme") return theme();
  else if (button.dataset.copy !== undefined) return copy(button);
  else return;
  drawCurves();
});

document.addEventListener("toggle", (event) => { // what was folded had no width
  if (!event.target.open) return;
  event.target.querySelectorAll("figure[data-timeline]").forEach(drawTimeline);
  event.target.querySelectorAll("figure[data-roofline]").forEach(drawRoofline);
}, true);

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

function theme() {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* a page from a file may have no storage */ }
}
try { const kept = localStorage.getItem("theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* the same */ }

let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
draw();

// The page of trainer watch asks for what is new; what is open stays open, and what is chosen stays chosen.
const live = document.getElementById("live");

async function look() {
  try {
    const answer = await fetch(`live?version=${live.dataset.version}`, { cache: "no-store" });
    if (answer.status === 200) {
      const fresh = await answer.json(), page = document.getElementById("page");
      const open = [...page.querySelectorAll("details[open]")].map((one) => one.id);
      data = fresh.data;
      page.innerHTML = fresh.content; // made by the same template, which escapes all that is a run's
      for (const id of open) document.getElementById(id)?.setAttribute("open", "");
      live.dataset.version = fresh.version;
      document.title = fresh.title;
      draw();
    }
    live.className = "";
    live.textContent = "live";
  } catch {
    live.className = "lost";
    live.textContent = "not connected";
  }
  setTimeout(look, 1000 * live.dataset.seconds);
}
if (live) setTimeout(look, 1000 * live.dataset.seconds);
