// The plans of a search: measured times over foretold ones, and speed over memory.

const STATUSES = { done: ["c0", "measured"], out_of_memory: ["c1", "out of memory"], failed: ["c3", "failed"], timeout: ["c5", "hung, or too slow"] };
const GREY = ["c6", "not tried"];

function drawSearch(figure) {
  const [place, kind] = figure.dataset.search.split(" "), points = data.searches[place];
  const tried = points.filter((one) => one.status in STATUSES);
  (kind === "foretold" ? drawForetold : drawFront)(figure, points, tried);
}

// A plot of points, each {x, y, text, look} with an optional bar from `low` to `high`; `more` adds lines to it.
function scatter(figure, spots, xs, ys, [across, up], more) {
  const holder = figure.querySelector(".plot"), width = Math.max(240, holder.clientWidth), height = Math.min(340, 0.75 * width);
  const box = { left: 54, right: width - 12, top: 24, bottom: height - 38 };
  const x = linear(...xs, box.left, box.right, Math.max(3, width / 110)), y = linear(...ys, box.bottom, box.top, height / 55);
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.append(svg("title", {}, `${up} over ${across} of ${spots.length} plans`), axes(box, x, y, tick, tick));
  picture.append(svg("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, across));
  picture.append(svg("text", { x: box.left - 44, y: 12 }, up));
  picture.append(...more(x, y));
  const said = figure.querySelector(".readout");
  for (const one of spots) {
    const group = svg("g", { class: one.look, tabindex: one.grey ? -1 : 0 }, svg("title", {}, one.text));
    if (one.high) group.append(svg("line", { class: "bar", x1: x.place(one.low), x2: x.place(Math.min(one.high, x.high)), y1: y.place(one.y), y2: y.place(one.y) }));
    group.append(svg("circle", { class: one.grey ? "kernel untried" : "kernel", r: one.grey ? 2.5 : 5, cx: x.place(one.x), cy: y.place(one.y) }));
    for (const event of ["pointerenter", "focus"]) group.addEventListener(event, () => { said.textContent = one.text; });
    picture.append(group);
  }
  holder.replaceChildren(picture);
  const keys = new Map(spots.map((one) => [one.key, one.look]));
  figure.querySelector(".keys").replaceChildren(...[...keys].map(([key, look]) => html("span", {}, html("span", { class: `swatch ${look}` }), key)));
}

const bounded = (values, least = 0) => [least, 1.06 * Math.max(...values, 1e-9)];

function describePlan(one) {
  const told = `expected ${seconds(one.expected)} (${seconds(one.low)} to ${seconds(one.high)}), predicted ${seconds(one.predicted)}, ${digits(one.memory_gib)} GiB reserved`;
  const found = one.measured ? `measured ${seconds(one.measured)}, ${count(one.tokens / one.measured)} tokens/s${one.memory ? `, ${digits(one.memory)} GiB allocated` : ""}` : (STATUSES[one.status] ?? GREY)[1];
  return `${one.plan}: ${found}; ${told}`;
}

function drawForetold(figure, points, tried) {
  const spots = tried.map((one) => {
    const [look, key] = STATUSES[one.status];
    return { x: one.expected, y: one.measured ?? 0, low: one.low, high: one.high, look, key, text: describePlan(one) };
  });
  const most = bounded(tried.flatMap((one) => [one.expected, one.measured ?? 0]));
  const predicted = (x, y) => tried.filter((one) => one.measured).map((one) =>
    svg("circle", { class: "dot c0", r: 3.5, cx: x.place(Math.min(one.predicted, x.high)), cy: y.place(one.measured) }));
  scatter(figure, spots, most, most, ["expected time of a step (s); hollow: predicted, without correction", "measured (s)"], (x, y) => [
    svg("path", { class: "diagonal", d: `M${x.place(0)} ${y.place(0)}L${x.place(most[1])} ${y.place(most[1])}` }), ...predicted(x, y),
  ]);
}

function drawFront(figure, points, tried) {
  const grey = points.filter((one) => !(one.status in STATUSES)).map((one) =>
    ({ x: one.memory_gib, y: one.tokens / one.expected, grey: true, look: GREY[0], key: `${GREY[1]}: as expected`, text: describePlan(one) }));
  const timed = tried.filter((one) => one.measured && one.memory).map((one) =>
    ({ x: one.memory, y: one.tokens / one.measured, front: one.front, look: "c0", key: "measured", text: describePlan(one) }));
  const best = timed.filter((one) => one.front).sort((a, b) => a.x - b.x), all = [...grey, ...timed];
  const steps = (x, y) => best.map((one, index) => `${index ? "H" : "M"}${x.place(one.x)}${index ? "V" : " "}${y.place(one.y)}`).join("");
  const memory = all.map((one) => one.x);
  scatter(figure, all, bounded(memory, 0.9 * Math.min(...memory)), bounded(all.map((one) => one.y)),
    ["GiB of a device (measured: allocated; not tried: reserved)", "tokens per second; line: the Pareto front of the measured"],
    (x, y) => best.length > 1 ? [svg("path", { class: "front", d: steps(x, y) })] : []);
}
