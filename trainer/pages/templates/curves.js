// Curves of metrics: one plot a panel, all over the same x, with one cursor.

const cursors = [];

function linesOf(panel) {
  const several = data.runs.length > 1, lines = [];
  data.runs.forEach((run, index) => {
    if (choice.hidden.has(index)) return;
    panel.names.forEach((name, place) => {
      const series = run.series.find((one) => one.name === name);
      if (!series) return;
      const colour = several ? index : place;
      lines.push({
        name, run: run.label, colour: `c${colour % COLOURS}`, held: name.startsWith("eval_loss"),
        dash: DASHES[(several ? place : Math.floor(colour / COLOURS)) % DASHES.length],
        x: series.i.map((at) => run.x[choice.x][at]), y: series.v,
      });
    });
  });
  return lines;
}

// Centred running mean: narrowed on both sides at the start, where curves are steep; gaps stay gaps.
function smoothed(values, window) {
  const sums = [0], counts = [0];
  values.forEach((value, index) => {
    sums.push(sums[index] + (value ?? 0));
    counts.push(counts[index] + (value === null ? 0 : 1));
  });
  return values.map((value, index) => {
    const reach = Math.min(index, Math.floor((window - 1) / 2));
    const [first, last] = [index - reach, Math.min(index + reach + 1, values.length)];
    return value === null ? null : (sums[last] - sums[first]) / (counts[last] - counts[first]);
  });
}

function pathOf(xs, ys, x, y) {
  let path = "", down = false;
  ys.forEach((value, index) => {
    const known = value !== null && xs[index] !== null && (!y.logarithmic || value > 0);
    if (known) path += `${down ? "L" : "M"}${x.place(xs[index]).toFixed(1)} ${y.place(value).toFixed(1)}`;
    down = known;
  });
  return path;
}

function range(lines, panel) {
  const values = [], [low, high] = choice.zoom ?? [-Infinity, Infinity];
  for (const line of lines)
    line.y.forEach((value, index) => {
      if (value !== null && line.x[index] >= low && line.x[index] <= high) values.push(value);
    });
  values.sort((a, b) => a - b);
  if (!values.length || (panel.zero && !values[0] && !values.at(-1))) return { low: 0, high: 1, least: values[0], above: 0, spread: 1 };
  const usual = values[Math.floor(0.98 * (values.length - 1))];
  let [least, most] = [values[0], values.at(-1)], above = 0;
  const spread = least > 0 ? most / least : 1;
  if (panel.zero) {
    // A first step that compiles would press all others onto the axis.
    if (values.length >= 20 && most > 4 * usual && usual > 0) {
      most = 1.5 * usual;
      above = values.filter((value) => value > most).length;
    }
    least = Math.min(0, least);
  }
  const room = 0.06 * (most - least);
  return { low: least - (panel.zero && least >= 0 ? 0 : room), high: most + room, least: values[0], above, spread };
}

function drawPanel(figure) {
  const panel = data.panels[figure.dataset.panel], holder = figure.querySelector(".plot");
  const lines = linesOf(panel), keys = figure.querySelector(".keys");
  const width = Math.max(200, holder.clientWidth), height = figure.classList.contains("wide") ? 260 : 190;
  const box = { left: 46, right: width - 6, top: 8, bottom: height - 22 };
  const over = lines.flatMap((line) => line.x.filter((value) => value !== null));
  let [first, last] = [Infinity, -Infinity];
  for (const value of over) [first, last] = [Math.min(first, value), Math.max(last, value)];
  if (!over.length) [first, last] = [0, 1];
  const { low, high, least, above, spread } = range(lines, panel);
  const wanted = choice.log.get(panel.title) ?? (panel.title === "gradient norm" && spread > 30);
  const x = linear(...(choice.zoom ?? [first, last]), box.left, box.right, Math.max(3, width / 110));
  if (choice.x !== "hours") x.ticks = x.ticks.filter(Number.isInteger);
  const y = wanted && least > 0 ? logarithmic(least, high, box.bottom, box.top) : linear(low, high, box.bottom, box.top, height / 50);
  y.logarithmic = wanted && least > 0;

  const clip = `clip-${figure.dataset.panel}`;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.append(svg("title", {}, summary(panel, lines)));
  picture.append(svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: box.top - 4, width: box.right - box.left, height: box.bottom - box.top + 8 })));
  picture.append(axes(box, x, y, tick, tick, choice.x));
  const drawn = svg("g", { "clip-path": `url(#${clip})` });
  for (const line of lines) {
    const group = svg("g", { class: line.colour });
    const rolling = choice.smooth > 1 && !line.held;
    if (rolling) group.append(svg("path", { class: "curve faint", d: pathOf(line.x, line.y, x, y) }));
    line.shown = rolling ? smoothed(line.y, choice.smooth) : line.y;
    group.append(svg("path", { class: "curve", d: pathOf(line.x, line.shown, x, y), "stroke-dasharray": line.dash }));
    const known = line.y.filter((value) => value !== null).length;
    if (known === 1 || (line.held && known <= 80))
      line.y.forEach((value, index) => {
        if (value !== null) group.append(svg("circle", { class: "dot", r: 3, cx: x.place(line.x[index]), cy: y.place(value) }));
      });
    drawn.append(group);
  }
  const cursor = svg("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  picture.append(drawn, cursor);
  holder.replaceChildren(picture);
  pointer(picture, box, (at) => moveCursors(at === null ? null : x.value(at)), (from, to) => {
    choice.zoom = [x.value(from), x.value(to)];
    drawCurves();
  });
  keyboard(picture, [...new Set(over)].filter((value) => value >= x.low && value <= x.high).sort((a, b) => a - b), moveCursors);
  picture.addEventListener("dblclick", () => { choice.zoom = null; drawCurves(); });
  const button = figure.querySelector("button");
  button.setAttribute("aria-pressed", String(y.logarithmic));
  button.hidden = !(least > 0);
  button.onclick = () => { choice.log.set(panel.title, !y.logarithmic); drawCurves(); };
  figure.querySelector(".readout").textContent = above ? `${above} ${above === 1 ? "point is" : "points are"} above the picture` : "";
  cursors.push((value) => {
    const inside = value !== null && value >= x.low && value <= x.high;
    fill(cursor, { visibility: inside ? "visible" : "hidden", x1: x.place(value ?? 0), x2: x.place(value ?? 0) }, []);
    keys.replaceChildren(...lines.map((line) => keyOf(line, panel, inside ? value : null)));
  });
}

// What a panel shows, in words.
function summary(panel, lines) {
  const texts = lines.map((line) => {
    const known = line.y.filter((value) => value !== null);
    return `${line.run} ${line.name}: ${exact(known[0])} to ${exact(known.at(-1))}`;
  });
  return `${panel.title}. ${texts.join("; ")}`;
}

// A curve's name, where there are several, and its value under the cursor or at its end.
function keyOf(line, panel, value) {
  let at = line.y.findLastIndex((one) => one !== null);
  if (value !== null) {
    let gap = Infinity;
    line.x.forEach((one, index) => {
      if (one !== null && line.y[index] !== null && Math.abs(one - value) < gap) [at, gap] = [index, Math.abs(one - value)];
    });
  }
  const named = [
    data.runs.length > 1 && data.runs.length <= 4 ? line.run : "", panel.names.length > 1 ? line.name.replace(/^.*?\//, "") : "",
  ].join(" ").trim();
  const mark = svg("svg", { width: 16, height: 8, class: line.colour, "aria-hidden": "true" }, svg("path", { class: "curve", d: "M0 4H14", "stroke-dasharray": line.dash }));
  return html("span", { title: `${line.run} ${line.name}` }, mark, html("i", {}, named), " ", html("b", {}, exact(line.shown[at])));
}

let waiting = null;
function moveCursors(value) {
  if (waiting === null) requestAnimationFrame(() => { for (const move of cursors) move(waiting.value); waiting = null; });
  waiting = { value };
}

function drawCurves() {
  cursors.length = 0;
  for (const figure of document.querySelectorAll("figure[data-panel]")) drawPanel(figure);
  for (const move of cursors) move(null);
  for (const button of document.querySelectorAll("[data-x]")) button.setAttribute("aria-pressed", String(button.dataset.x === choice.x));
  for (const button of document.querySelectorAll("[data-run]")) button.setAttribute("aria-pressed", String(!choice.hidden.has(Number(button.dataset.run))));
  const reset = document.getElementById("reset"), smooth = document.getElementById("smooth");
  if (reset) reset.hidden = choice.zoom === null;
  if (smooth) [smooth.value, document.getElementById("smooth-is").textContent] = [choice.smooth, choice.smooth > 1 ? `${choice.smooth} points` : "none"];
}
