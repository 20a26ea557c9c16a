"use strict";
// The charts of the page: what Chart.js is to draw, and what the reader has chosen. Names and texts of runs are drawn on
// a canvas or become text nodes; they are never markup.

let data = JSON.parse(document.getElementById("data").textContent);
const choice = { x: "step", smooth: 1, log: new Map(), hidden: new Set(), zooms: new Map() };
const charts = new Map(); // figure -> its chart, and what keys and pointer do there
const COLOURS = 7, DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4], [1, 2], [8, 2, 1, 2, 1, 2], [4, 1]];
const KINDS = { F: "forward", B: "full backward", I: "input gradient", W: "weight gradient" };
const STATUSES = {
  done: ["measured", "c0"], out_of_memory: ["out of memory", "c1"], failed: ["failed", "c3"], timeout: ["hung, or too slow", "c5"],
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value), notation = size < 1e4 ? "standard" : "compact";
  if (size >= 1e17 || (size && size < 1e-4)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return value.toLocaleString("en", { notation, maximumSignificantDigits: digits, useGrouping: false }).replace("K", "k");
}

const si = (value) => number(value, 3).replace("B", "G");
const tick = (value) => number(value); // Chart.js passes more arguments

function seconds(value) {
  const [unit, scale] = value >= 1 || !value ? ["s", 1] : value >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return `${number(value * scale, 3)} ${unit}`;
}

const colours = new Map();

// The colour of a class of the style sheet: a canvas has no classes.
function colourOf(look, opacity = 1) {
  const key = `${look} ${opacity}`;
  if (!colours.has(key)) {
    const probe = document.body.appendChild(element("i", { class: look })), { color } = getComputedStyle(probe);
    probe.remove();
    colours.set(key, Chart.helpers.color(color).alpha(opacity).rgbString());
  }
  return colours.get(key);
}

const line = (points, look, more) => ({ type: "line", data: points, borderColor: colourOf(look), silent: true, ...more });
const axis = (text, more, ticks) => ({ type: "linear", title: { display: Boolean(text), text }, ...more, ticks });

// A logarithmic axis around some values, with about eight ticks: at 1, 2 and 5 of each power of ten, or at some powers.
function logarithmic(text, values, label = tick) {
  const least = Math.min(...values) / 1.01, most = Math.max(...values) * 1.01;
  const [low, high] = [least, most].map((value) => 10 ** Math.floor(Math.log10(value)));
  const min = low * [5, 2, 1].find((digit) => digit * low <= least || digit === 1);
  const max = high * [1, 2, 5, 10].find((digit) => digit * high >= most || digit === 10);
  const decades = Math.log10(max / min), digits = decades < 3 ? [1, 2, 5] : [1], every = Math.ceil(decades / 8);
  const marked = ({ value }) => {
    const [digit, power] = value.toExponential(6).split("e").map(Number);
    return digits.includes(digit) && power % every === 0;
  };
  const afterBuildTicks = (scale) => { scale.ticks = scale.ticks.filter(marked); };
  return axis(text, { type: "logarithmic", min, max, afterBuildTicks }, { callback: label });
}

// Writes the `tag` of each point that has one: into its bar, if it has room there, or beside its circle.
Chart.register({
  id: "tags",
  afterDatasetsDraw(chart) {
    const { ctx, chartArea, chartArea: { left, right } } = chart;
    Chart.helpers.clipArea(ctx, chartArea);
    ctx.textBaseline = "middle";
    chart.data.datasets.forEach((set, place) => chart.getDatasetMeta(place).data.forEach((drawn, index) => {
      const { tag } = set.data[index], bar = drawn.base !== undefined, side = drawn.x > (left + right) / 2 ? -1 : 1;
      if (tag === undefined || (bar && drawn.width < ctx.measureText(tag).width + 4)) return;
      ctx.fillStyle = colourOf(bar ? "paper" : "plain");
      ctx.textAlign = bar ? "center" : side < 0 ? "right" : "left";
      ctx.fillText(tag, bar ? (drawn.base + drawn.x) / 2 : drawn.x + side * (drawn.options.radius + 4), drawn.y);
    }));
    Chart.helpers.unclipArea(ctx);
  },
});

// Draws a chart into a figure, or draws it anew. key: of the charts that are zoomed together, which `redraw` draws.
// stops: what arrow keys go through; `go` gets each, and null when the chart is left.
function show(figure, key, summary, datasets, scales, { mode = "xy", legend = false, redraw, stops, go, ...more }) {
  for (const [name, limits] of Object.entries(choice.zooms.get(key) ?? {})) Object.assign(scales[name], limits);
  const onZoom = ({ chart: { scales: now } }) => {
    choice.zooms.set(key, Object.fromEntries([...mode].map((name) => [name, { min: now[name].min, max: now[name].max }])));
    redraw(figure);
  };
  const options = { ...more, scales, plugins: { legend: { display: legend }, zoom: { zoom: { mode, onZoom } } } };
  let chart = charts.get(figure)?.chart;
  if (chart) {
    chart.data.datasets = datasets;
    chart.options = options;
    chart.update();
  } else {
    const canvas = element("canvas", { role: "img", tabindex: 0 });
    figure.querySelector(".plot").append(canvas);
    chart = new Chart(canvas, { data: { datasets }, options });
  }
  chart.canvas.setAttribute("aria-label", summary);
  charts.set(figure, { chart, key, redraw, stops, go, at: null });
  return chart;
}

// A chart of points and bars; those of a dataset that is not silent are told by `say`.
function showPoints(figure, key, summary, datasets, scales, { say = (point) => point.text, compare, ...more }) {
  const pointOf = ({ datasetIndex, index }) => datasets[datasetIndex].data[index], said = figure.querySelector(".readout");
  const stops = datasets.flatMap((set, datasetIndex) => (set.silent ? [] : set.data.map((_, index) => ({ datasetIndex, index }))));
  if (compare) stops.sort((one, other) => compare(pointOf(one), pointOf(other)));
  const tell = (stop) => { said.textContent = stop ? say(pointOf(stop)) : ""; };
  const go = (stop) => {
    tell(stop);
    chart.setActiveElements(stop ? [stop] : []);
    chart.render();
  };
  const onHover = (_, found) => tell(found.find((one) => !datasets[one.datasetIndex].silent));
  const chart = show(figure, key, summary, datasets, scales, { interaction: { mode: "point" }, onHover, stops, go, ...more });
}

// Curves of metrics: a chart a panel, all over the same x, with one cursor.

const cursors = [];
const areMany = () => data.runs.length - choice.hidden.size > COLOURS; // their names stand above the charts, not in each
let near = null; // of many runs the one at the pointer, which all charts tell apart

function linesOf(panel) {
  const several = data.runs.length > 1;
  return data.runs.flatMap((run, index) => (choice.hidden.has(index) ? [] : panel.names.flatMap((name, place) => {
    const series = run.series.find((one) => one.name === name), look = several ? index : place;
    if (!series) return [];
    const all = series.i.map((at, index) => ({ x: run.x[choice.x][at], y: series.v[index] }));
    const points = all.filter(({ x }) => x !== null), held = name.startsWith("eval_loss");
    // Runs, and metrics beside them, that have a colour in common differ by their dashes.
    const dash = DASHES[(Math.floor(look / COLOURS) * (several ? panel.names.length : 1) + (several ? place : 0)) % DASHES.length];
    return [{ name, index, run: run.label, look: `c${look % COLOURS}`, dash, held, points, shown: points }];
  })));
}

// Centred running mean: narrowed on both sides at the start, where curves are steep; gaps stay gaps.
function smoothed(points) {
  const sums = [0], counts = [0];
  points.forEach(({ y }, index) => {
    sums.push(sums[index] + (y ?? 0));
    counts.push(counts[index] + (y === null ? 0 : 1));
  });
  return points.map(({ x, y }, index) => {
    const reach = Math.min(index, Math.floor((choice.smooth - 1) / 2));
    const first = index - reach, last = Math.min(index + reach + 1, points.length);
    return { x, y: y === null ? null : (sums[last] - sums[first]) / (counts[last] - counts[first]) };
  });
}

function datasetsOf(one) {
  const known = one.points.filter(({ y }) => y !== null).length, rolling = choice.smooth > 1 && !one.held;
  if (rolling) one.shown = smoothed(one.points);
  const dots = known === 1 || (one.held && known <= 80) ? { pointRadius: 3, pointBackgroundColor: colourOf("paper") } : {};
  const { index: run, dash } = one, faint = colourOf(one.look, 0.2);
  const borderColor = near === null || near === run ? colourOf(one.look) : faint;
  const drawn = line(one.shown, one.look, { run, order: near === run ? -1 : 0, borderColor, borderDash: dash, ...dots });
  return rolling ? [drawn, line(one.points, one.look, { run, borderColor: faint })] : [drawn];
}

function drawPanel(figure) {
  const panel = data.panels[figure.dataset.panel], lines = linesOf(panel);
  const { min = -Infinity, max = Infinity } = choice.zooms.get("curves")?.x ?? {};
  const inside = (x) => x >= min && x <= max;
  const all = lines.flatMap((one) => one.points), known = all.filter(({ x, y }) => y !== null && inside(x));
  const seen = known.map(({ y }) => y).sort((a, b) => a - b);
  const least = seen[0], most = seen.at(-1), usual = seen[Math.floor(0.98 * (seen.length - 1))];
  const log = least > 0 && (choice.log.get(panel.title) ?? (panel.names[0] === "grad_norm" && most > 30 * least));
  // A first step that compiles would press all others onto the axis.
  const cut = panel.zero && !log && seen.length >= 20 && usual > 0 && most > 4 * usual ? 1.5 * usual : undefined;
  const above = cut ? seen.filter((value) => value > cut).length : 0;
  const stops = [...new Set(all.map(({ x }) => x).filter(inside))].sort((a, b) => a - b);
  const scales = {
    x: axis(choice.x, { min: stops[0], max: stops.at(-1) }, { maxTicksLimit: 7, precision: choice.x === "hours" ? undefined : 0 }),
    y: log ? logarithmic("", [least, most]) : axis("", { beginAtZero: panel.zero, max: cut, grace: "5%" }, { maxTicksLimit: 6 }),
  };
  const told = lines.map(({ run, name, points }) => `${run} ${name}: ${number(points[0]?.y)} to ${number(points.at(-1)?.y)}`);
  const chart = show(figure, "curves", `${panel.title} over ${choice.x}. ${told.join("; ")}`, lines.flatMap(datasetsOf), scales, {
    mode: "x", parsing: false, events: [], redraw: drawCurves, stops, go: moveCursors,
  });
  const button = figure.querySelector("button"), keys = figure.querySelector(".keys"), mark = figure.querySelector(".cursor");
  button.setAttribute("aria-pressed", String(log));
  button.hidden = !(least > 0);
  button.onclick = () => { choice.log.set(panel.title, !log); drawCurves(); };
  cursors.push((value, other) => {
    if (other) {
      chart.data.datasets = lines.flatMap(datasetsOf);
      chart.update();
    }
    const { x } = chart.scales, shown = value !== null && value >= x.min && value <= x.max;
    const told = lines.filter(({ index }) => (near === null ? shown || !areMany() : near === index));
    mark.hidden = !shown;
    mark.style.left = `${x.getPixelForValue(value ?? 0)}px`;
    keys.replaceChildren(...told.map((one) => keyOf(one, panel, shown ? value : null)));
    const cutOff = above ? `${above} ${above === 1 ? "point is" : "points are"} above the chart` : "";
    const place = choice.x === "hours" ? number(value) : Math.round(value).toLocaleString("en");
    figure.querySelector(".readout").textContent = shown ? `${choice.x} ${place}` : cutOff;
  });
}

// A curve's name, where there are several, and its value under the cursor or at its end.
function keyOf(one, panel, value) {
  const known = one.shown.filter(({ y }) => y !== null), far = ({ x }) => Math.abs(x - value);
  const nearest = (best, point) => (far(point) < far(best) ? point : best);
  const point = value === null ? known.at(-1) : known.reduce(nearest, known[0]);
  const run = data.runs.length > 1 ? one.run : "";
  const name = panel.names.length > 1 ? one.name.replace(/^.*?\//, "") : "";
  const mark = element("i", { class: `dash${DASHES.indexOf(one.dash)} ${one.look}` });
  const short = run.length > 36 ? `${run.slice(0, 17)}…${run.slice(-18)}` : run; // ends of names differ as often as beginnings
  const texts = [element("em", {}, `${short} ${name}`.trim()), " ", element("b", {}, number(point?.y, 5))];
  return element("span", { title: `${one.run} ${one.name}` }, mark, ...texts);
}

let waiting = null;
function moveCursors(value, run = null) {
  if (waiting === null) requestAnimationFrame(() => {
    const other = near !== waiting.run;
    near = waiting.run;
    for (const move of cursors) move(waiting.value, other);
    waiting = null;
  });
  waiting = { value, run };
}

function drawCurves() {
  cursors.length = 0;
  for (const figure of document.querySelectorAll("figure[data-panel]")) drawPanel(figure);
  for (const move of cursors) move(null);
  for (const button of document.querySelectorAll("[data-x], [data-run]")) {
    const { x, run } = button.dataset;
    button.setAttribute("aria-pressed", String(x ? x === choice.x : !choice.hidden.has(Number(run))));
  }
  const reset = document.getElementById("reset"), smooth = document.getElementById("smooth");
  if (!reset) return;
  reset.hidden = !choice.zooms.has("curves");
  smooth.value = choice.smooth;
  document.getElementById("smooth-is").textContent = choice.smooth > 1 ? `${choice.smooth} points` : "none";
}

// Timelines of a pipeline: a row a rank, a bar an action; the rest is bubble.

function drawTimeline(figure) {
  const key = figure.dataset.timeline, [run, index] = key.split(" ").map(Number), { timelines } = data.runs[run];
  const { name, ranks, makespan, bubble, bubbles } = timelines[index], row = ranks.length > 24 ? 9 : ranks.length > 8 ? 16 : 24;
  const bars = (look, opacity, barThickness) => ({ type: "bar", data: [], backgroundColor: colourOf(look, opacity), barThickness });
  const sets = new Map();
  ranks.forEach((spans, rank) => {
    const last = Math.max(1, ...spans.map((span) => span[1]));
    for (const [kind, chunk, batch, start, end, stage, part] of spans) {
      const look = kind in KINDS ? kind : "soft", set = [look, chunk / last, part > 0].join();
      if (!sets.has(set)) sets.set(set, bars(look, 1 - (0.45 * chunk) / last, part ? (row - 3) / 2 : row - 3));
      const what = [KINDS[kind] ?? kind, ...(batch === null ? [] : [`micro-batch ${batch}`]), `stage ${stage}`].join(", ");
      const tag = batch !== null && row > 12 && !part ? String(batch) : undefined;
      sets.get(set).data.push({ x: [start, end], y: rank + [0, -0.25, 0.25][part], rank, what, tag });
    }
  });
  const idle = { ...bars("bubble", 1, row - 3), silent: true, data: ranks.map((_, rank) => ({ x: [0, makespan], y: rank })) };
  const afterBuildTicks = (scale) => { scale.ticks = ranks.map((_, value) => ({ value })); };
  const rows = { reverse: true, offset: false, min: -0.5, max: ranks.length - 0.5, afterBuildTicks, grid: { display: false } };
  const every = (label) => ({ autoSkip: false, callback: (value) => (row > 12 || value % 4 === 0 ? label(value) : "") });
  const scales = {
    x: axis("", { min: 0, max: Math.max(...timelines.map((one) => one.makespan)) }, { callback: seconds }),
    y: axis("", rows, every((rank) => `rank ${rank}`)),
    right: axis("", { ...rows, position: "right" }, every((rank) => `${number(100 * bubbles[rank], 3)}%`)),
  };
  figure.querySelector(".plot").style.height = `${ranks.length * row + 36}px`;
  const summary = `${name} timeline of ${ranks.length} ranks: makespan ${seconds(makespan)}, ${number(100 * bubble, 3)}% between actions`;
  showPoints(figure, key, summary, [...sets.values(), idle], scales, {
    indexAxis: "y", mode: "x", redraw: drawTimeline, compare: (one, other) => one.rank - other.rank || one.x[0] - other.x[0],
    say: ({ x: [start, end], rank, what }) => `rank ${rank}: ${what}: ${seconds(end - start)}, from ${seconds(start)} to ${seconds(end)}`,
  });
}

// The roofline: what kernels reach, over the operations that they do for each byte of memory that they move.

function drawRoofline(figure) {
  const key = figure.dataset.roofline, { kernels, peak, bandwidth, products, memory } = data.runs[key].roofline;
  const byTime = [...kernels].sort((a, b) => b.seconds - a.seconds), named = new Set(byTime.slice(0, 4));
  const points = kernels.map((one) => {
    const { name, calls, intensity, rate } = one, reached = number((100 * rate) / Math.min(products, memory * intensity), 3);
    const share = peak ? `, ${reached}% of what is reached there` : "";
    return {
      x: intensity, y: rate, r: 3 + 11 * Math.sqrt(one.seconds / byTime[0].seconds),
      tag: named.has(one) ? name.replace(/^(.{13}).{3,}(.{14})$/, "$1…$2") : undefined,
      text: `${name}: ${seconds(one.seconds)} in ${calls} calls, ${si(rate)}FLOP/s at ${number(intensity, 3)} FLOP per byte${share}`,
    };
  });
  const around = (values) => values.flatMap((value) => [0.8 * value, 1.25 * value]); // circles and names have a size
  const x = logarithmic("FLOP per byte", [...around(points.map((one) => one.x)), ...(peak ? [products / memory, peak / bandwidth] : [])]);
  const y = logarithmic("FLOP/s", [...around(points.map((one) => one.y)), ...(peak ? [peak] : [])], si);
  const roof = (flat, slope, borderDash) => {
    const corners = [x.min, flat / slope, x.max].map((at) => ({ x: at, y: Math.min(flat, slope * at) }));
    return line(corners, "plain", { borderDash });
  };
  const roofs = peak ? [roof(products, memory, []), roof(peak, bandwidth, [4, 4])] : [];
  const looks = (opacity) => kernels.map((one) => colourOf(`t-${one.kind}`, opacity));
  const sets = [{ type: "bubble", data: points, backgroundColor: looks(0.55), borderColor: looks(1) }, ...roofs];
  showPoints(figure, `roofline ${key}`, `roofline of ${kernels.length} kernels`, sets, { x, y }, { redraw: drawRoofline });
}

// The plans of a search: measured times over foretold ones, and speed over memory.

function describePlan(one) {
  const speed = `${number(one.tokens / one.measured, 3)} tokens/s${one.memory ? `, ${number(one.memory, 3)} GiB allocated` : ""}`;
  const found = one.measured ? `measured ${seconds(one.measured)}, ${speed}` : (STATUSES[one.status] ?? ["not tried"])[0];
  const expected = `expected ${seconds(one.expected)} (${seconds(one.low)} to ${seconds(one.high)})`;
  return `${one.plan}: ${found}; ${expected}, predicted ${seconds(one.predicted)}, ${number(one.memory_gib, 3)} GiB reserved`;
}

function dots(label, look, points, more) {
  return { type: "scatter", label, data: points, backgroundColor: colourOf(look, 0.55), borderColor: colourOf(look), ...more };
}

const upTo = (values) => ({ min: 0, max: 1.06 * Math.max(...values, 1e-9) });

function foretoldSets(plans) {
  const tried = plans.filter((one) => one.status in STATUSES), timed = tried.filter((one) => one.measured);
  const limits = upTo(tried.flatMap((one) => [one.expected, one.measured ?? 0])), sets = [];
  for (const [status, [label, look]] of Object.entries(STATUSES)) {
    const points = tried.filter((one) => one.status === status).map((one) => ({ ...one, y: one.measured ?? 0 }));
    const ranges = points.flatMap(({ low, high, y }) => [{ x: low, y }, { x: high, y }, { x: null, y: null }]);
    const places = points.map((one) => ({ x: one.expected, y: one.y, text: describePlan(one) }));
    if (points.length) sets.push(dots(label, look, places), line(ranges, look, { borderColor: colourOf(look, 0.5) }));
  }
  const predicted = timed.map((one) => ({ x: one.predicted, y: one.measured }));
  const hollow = { silent: true, radius: 3.5, backgroundColor: colourOf("paper") };
  sets.push(dots("predicted, without correction", "c0", predicted, hollow));
  sets.push(line([{ x: 0, y: 0 }, { x: limits.max, y: limits.max }], "soft"));
  return [sets, { x: axis("expected time of a step (s)", limits), y: axis("measured (s)", limits) }];
}

function frontSets(plans) {
  const place = (one, memory, time) => ({ x: memory, y: one.tokens / time, front: one.front, text: describePlan(one) });
  const timed = plans.filter((one) => one.status in STATUSES && one.measured && one.memory);
  const known = timed.map((one) => place(one, one.memory, one.measured));
  const others = plans.filter((one) => !(one.status in STATUSES)).map((one) => place(one, one.memory_gib, one.expected));
  const memory = [...known, ...others].map((one) => one.x), speed = [...known, ...others].map((one) => one.y);
  const front = known.filter((one) => one.front).sort((a, b) => a.x - b.x).map(({ x, y }) => ({ x, y }));
  const sets = [
    dots("measured", "c0", known), dots("not tried: as expected", "c6", others, { radius: 2.5 }),
    line(front, "c1", { stepped: true, label: "Pareto front of the measured" }),
  ];
  const x = axis("GiB of a device (measured: allocated; not tried: reserved)", { ...upTo(memory), min: 0.9 * Math.min(...memory) });
  return [sets, { x, y: axis("tokens per second", upTo(speed)) }];
}

function drawSearch(figure) {
  const key = figure.dataset.search, [place, kind] = key.split(" "), plans = data.searches[place];
  const [sets, scales] = (kind === "foretold" ? foretoldSets : frontSets)(plans);
  const summary = `${scales.y.title.text} over ${scales.x.title.text} of ${plans.length} plans`;
  showPoints(figure, key, summary, sets, scales, { redraw: drawSearch, legend: true });
}

const DRAWN = { timeline: drawTimeline, roofline: drawRoofline, search: drawSearch };

function draw() {
  colours.clear(); // the page may have become light or dark
  Chart.defaults.set({
    animation: false, maintainAspectRatio: false, color: colourOf("soft"), borderColor: colourOf("rule"),
    font: { size: 11, family: getComputedStyle(document.body).fontFamily },
    scale: { ticks: { maxRotation: 0, includeBounds: false } },
    scales: { linear: { ticks: { callback: tick } } },
    datasets: {
      line: { borderWidth: 1.5, pointRadius: 0, clip: 4 }, scatter: { radius: 5, hoverRadius: 7 },
      bar: { grouped: false, inflateAmount: -0.3 },
    },
    plugins: {
      legend: { align: "start", labels: { boxHeight: 6, usePointStyle: true, filter: ({ text }) => text } },
      tooltip: { enabled: false },
      zoom: { zoom: { drag: { enabled: true, threshold: 8, backgroundColor: colourOf("running", 0.15) } } },
    },
  });
  drawCurves();
  for (const [kind, make] of Object.entries(DRAWN)) document.querySelectorAll(`figure[data-${kind}]`).forEach(make);
}
