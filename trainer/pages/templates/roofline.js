// The roofline: what kernels reach, over the operations that they do for each byte of memory that they move.

function drawRoofline(figure) {
  const { kernels, peak, bandwidth, products, memory } = data.runs[figure.dataset.roofline].roofline, holder = figure.querySelector(".plot");
  const width = Math.max(240, holder.clientWidth), height = Math.min(380, 0.7 * width);
  const box = { left: 54, right: width - 10, top: 10, bottom: height - 36 };
  const bounds = (values) => [Math.min(...values) / 2, Math.max(...values) * 2];
  const ridge = peak ? [products / memory, peak / bandwidth] : [];
  const across = bounds([...kernels.map((one) => one.intensity), ...ridge]);
  const up = bounds([...kernels.map((one) => one.rate), ...(peak ? [peak] : [])]);
  const x = logarithmic(...across, box.left, box.right), y = logarithmic(...up, box.bottom, box.top);
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.append(svg("title", {}, `roofline of ${kernels.length} kernels`), axes(box, x, y, tick, si));
  picture.append(svg("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, "FLOP per byte"));
  picture.append(svg("text", { x: box.left + 6, y: box.top + 10 }, "FLOP/s"));
  const clip = `roof-${figure.dataset.roofline}`;
  picture.append(svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: box.top - 6, width: box.right - box.left, height: box.bottom - box.top + 6 })));
  const drawn = svg("g", { "clip-path": `url(#${clip})` });
  const roof = (value) => Math.min(products, memory * value);
  for (const [flat, slope, dash] of peak ? [[products, memory, ""], [peak, bandwidth, "4 4"]] : []) {
    const places = [across[0], flat / slope, across[1]].map((value) => `${x.place(value)} ${y.place(Math.min(flat, slope * value))}`);
    drawn.append(svg("path", { class: "roof", d: `M${places.join("L")}`, "stroke-dasharray": dash }));
  }
  const longest = Math.max(...kernels.map((one) => one.seconds));
  const said = figure.querySelector(".readout");
  for (const one of kernels) {
    const share = peak ? `, ${digits((100 * one.rate) / roof(one.intensity))}% of what is reached there` : "";
    const text = `${one.name}: ${seconds(one.seconds)} in ${one.calls} calls, ${si(one.rate)}FLOP/s at ${digits(one.intensity)} FLOP per byte${share}`;
    const dot = svg("circle", { class: `kernel t-${one.kind}`, cx: x.place(one.intensity), cy: y.place(one.rate), r: 3 + 11 * Math.sqrt(one.seconds / longest), tabindex: 0 });
    dot.append(svg("title", {}, text));
    for (const event of ["pointerenter", "focus"]) dot.addEventListener(event, () => { said.textContent = text; });
    drawn.append(dot);
  }
  for (const one of [...kernels].sort((a, b) => b.seconds - a.seconds).slice(0, 4)) {
    const left = x.place(one.intensity) > (box.left + box.right) / 2, away = 8 + 11 * Math.sqrt(one.seconds / longest);
    const name = one.name.length > 28 ? `${one.name.slice(0, 27)}…` : one.name;
    drawn.append(svg("text", { class: "label", x: x.place(one.intensity) + (left ? -away : away), y: y.place(one.rate) + 4, "text-anchor": left ? "end" : "start" }, name));
  }
  picture.append(drawn);
  holder.replaceChildren(picture);
}
