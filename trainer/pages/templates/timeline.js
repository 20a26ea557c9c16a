// Timelines of a pipeline: a row a rank, a bar an action, the rest is bubble.

const KINDS = { F: "forward", B: "full backward", I: "input gradient", W: "weight gradient" };
const zooms = new Map();

function drawTimeline(figure) {
  const [run, index] = figure.dataset.timeline.split(" ").map(Number), key = figure.dataset.timeline;
  const timeline = data.runs[run].timelines[index], holder = figure.querySelector(".plot");
  const longest = Math.max(...data.runs[run].timelines.map((one) => one.makespan));
  const width = Math.max(240, holder.clientWidth), rows = timeline.ranks.length;
  const row = rows > 24 ? 9 : rows > 8 ? 16 : 24;
  const box = { left: 46, right: width - 44, top: 2, bottom: rows * row + 4 };
  const x = linear(...(zooms.get(key) ?? [0, longest]), box.left, box.right, Math.max(3, width / 120));
  const picture = svg("svg", { width, height: box.bottom + 22, viewBox: `0 0 ${width} ${box.bottom + 22}`, role: "img" });
  picture.append(svg("title", {}, `${timeline.name} timeline of ${rows} ranks: makespan ${seconds(timeline.makespan)}, bubble ${digits(100 * timeline.bubble)}%`));
  picture.append(axes(box, x, { ticks: [] }, seconds, tick, "time"));
  const clip = `time-${run}-${index}`;
  picture.append(svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: 0, width: box.right - box.left, height: box.bottom })));
  const drawn = svg("g", { "clip-path": `url(#${clip})` });
  timeline.ranks.forEach((spans, rank) => {
    const top = box.top + rank * row, tall = row - 3;
    drawn.append(svg("rect", { class: "bubble", x: x.place(0), y: top, height: tall, width: Math.max(0, x.place(timeline.makespan) - x.place(0)) }));
    const chunks = Math.max(...spans.map((span) => span[1]), 0) + 1, paths = new Map();
    for (const [kind, chunk, batch, start, end, stage, part] of spans) {
      const name = `${kind in KINDS ? kind : "other"} ${chunk}`, high = part ? tall / 2 : tall;
      const [left, right, from] = [x.place(start), x.place(end), top + (part === 2 ? tall / 2 : 0)];
      const gap = right - left > 3 ? 0.6 : 0;
      paths.set(name, `${paths.get(name) ?? ""}M${left.toFixed(2)} ${from}H${(right - gap).toFixed(2)}v${high}H${left.toFixed(2)}z`);
    }
    for (const [name, path] of paths) {
      const [kind, chunk] = name.split(" ");
      drawn.append(svg("path", { class: kind, d: path, "fill-opacity": 1 - (0.45 * chunk) / Math.max(1, chunks - 1) }));
    }
    for (const [kind, , batch, start, end, , part] of spans)
      if (batch !== null && kind in KINDS && row > 12 && !part && x.place(end) - x.place(start) > 7 * String(batch).length + 4)
        drawn.append(svg("text", { class: "batch", x: (x.place(start) + x.place(end)) / 2, y: top + tall / 2 + 3.5 }, batch));
    if (row > 12 || rank % 4 === 0) {
      picture.append(svg("text", { x: box.left - 6, y: top + tall / 2 + 4, "text-anchor": "end" }, `rank ${rank}`));
      picture.append(svg("text", { x: box.right + 6, y: top + tall / 2 + 4 }, `${digits(100 * timeline.bubbles[rank])}%`));
    }
  });
  picture.append(drawn);
  holder.replaceChildren(picture);
  const said = figure.querySelector(".readout");
  const tell = (at, y) => {
    const rank = Math.floor((y - box.top) / row), time = at === null ? null : x.value(at);
    const span = at !== null && timeline.ranks[rank]?.find((one) => one[3] <= time && time < one[4]);
    said.textContent = span ? describe(rank, span) : "";
  };
  const spans = timeline.ranks.flatMap((some, rank) => some.map((span) => [rank, span]));
  keyboard(picture, spans, (place) => { said.textContent = place ? describe(...place) : ""; });
  pointer(picture, box, tell, (from, to) => { zooms.set(key, [x.value(from), x.value(to)]); drawTimeline(figure); });
  picture.addEventListener("dblclick", () => { zooms.delete(key); drawTimeline(figure); });
}

function describe(rank, [kind, , batch, start, end, stage]) {
  const what = [KINDS[kind] ?? kind, ...(batch === null ? [] : [`micro-batch ${batch}`]), `stage ${stage}`].join(", ");
  return `rank ${rank}: ${what}: ${seconds(end - start)}, from ${seconds(start)} to ${seconds(end)}`;
}
