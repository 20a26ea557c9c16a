"use strict";
// What the page is drawn from, and what its reader has chosen. Names and texts of runs become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";
let data = JSON.parse(document.getElementById("data").textContent);
const choice = { x: "step", smooth: 1, zoom: null, log: new Map(), hidden: new Set() };
const COLOURS = 7;
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Numbers for people.

function digits(value, many = 3) {
  return String(Number(value.toPrecision(many)));
}

function count(value) {
  const units = ["", "k", "M", "B", "T"];
  let power = 0;
  for (; Math.abs(value) >= 999.5 && power < units.length - 1; power += 1) value /= 1000;
  return digits(value) + units[power];
}

// The same with the prefix of a unit.
const si = (value) => count(value).replace("B", "G");

function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e15 || (size && size < 1e-3)) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  return size >= 1e4 ? count(value) : digits(value, 4);
}

function exact(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  return size >= 1e6 ? count(value) : size && size < 1e-3 ? value.toExponential(2) : digits(value, 5);
}

function seconds(value) {
  const size = Math.abs(value);
  return size >= 1 || !size ? `${digits(value)} s` : size >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
}

// Scales: from values to pixels, with the places of their ticks.

function linear(low, high, from, to, many) {
  if (!(high > low)) [low, high] = [low - (Math.abs(low) || 1) / 2, low + (Math.abs(low) || 1) / 2];
  const rough = (high - low) / many, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * power >= rough) * power;
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index += 1) ticks.push(index * step);
  const place = (value) => from + ((value - low) / (high - low)) * (to - from);
  return { low, high, place, ticks, value: (pixel) => low + ((pixel - from) / (to - from)) * (high - low) };
}

function logarithmic(low, high, from, to) {
  const [a, b] = [Math.log10(low), Math.log10(high > low ? high : low * 10)];
  const every = Math.max(1, Math.ceil((b - a) / 6)), between = b - a < 2.2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = Math.floor(a); power <= b; power += every)
    for (const part of between) if (part * 10 ** power >= low * 0.999 && part * 10 ** power <= 10 ** b * 1.001) ticks.push(part * 10 ** power);
  const place = (value) => from + ((Math.log10(value) - a) / (b - a)) * (to - from);
  return { low, high: 10 ** b, place, ticks, value: (pixel) => 10 ** (a + ((pixel - from) / (to - from)) * (b - a)) };
}

// The axes of a plot: grid, ticks and their labels; of x also its name, at its end.

function axes(box, x, y, xLabel, yLabel, name = "") {
  const group = svg("g");
  for (const value of y.ticks) {
    const at = y.place(value);
    group.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }));
    group.append(svg("text", { x: box.left - 6, y: at + 4, "text-anchor": "end" }, yLabel(value)));
  }
  for (const value of x.ticks) {
    const at = x.place(value);
    if (at > box.right - (name ? 7 * name.length + 8 : 4)) continue;
    group.append(svg("text", { x: at, y: box.bottom + 15, "text-anchor": "middle" }, xLabel(value)));
    group.append(svg("line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 3 }));
  }
  group.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  if (name) group.append(svg("text", { x: box.right, y: box.bottom + 15, "text-anchor": "end" }, name));
  return group;
}

// Drawing a stretch with the pointer: `chosen` gets its two ends in pixels; `moved` every place, null when it leaves.

function pointer(picture, box, moved, chosen) {
  let begin = null;
  const mark = svg("rect", { class: "brush", y: box.top, height: box.bottom - box.top, width: 0, x: 0 });
  picture.append(mark);
  const at = (event) => {
    const { left, top } = picture.getBoundingClientRect();
    return [Math.min(box.right, Math.max(box.left, event.clientX - left)), event.clientY - top];
  };
  const stretch = (x) => [Math.min(begin, x), Math.max(begin, x)];
  picture.addEventListener("pointerdown", (event) => {
    if (event.button === 0) [begin] = at(event);
  });
  picture.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    if (begin !== null) {
      const [low, high] = stretch(x);
      fill(mark, { x: low, width: high - low }, []);
    }
    moved(x, y);
  });
  const end = (event) => {
    if (begin === null) return;
    const [low, high] = stretch(at(event)[0]);
    begin = null;
    fill(mark, { width: 0 }, []);
    if (high - low > 8) chosen(low, high);
  };
  picture.addEventListener("pointerup", end);
  picture.addEventListener("pointercancel", () => { begin = null; fill(mark, { width: 0 }, []); });
  picture.addEventListener("pointerleave", (event) => { end(event); moved(null, null); });
}

// Going from place to place of a picture by keys: `moved` gets each place, null when the picture is left.

function keyboard(picture, places, moved) {
  let at = null;
  picture.setAttribute("tabindex", 0);
  picture.addEventListener("keydown", (event) => {
    const far = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (far === undefined || !places.length) return;
    event.preventDefault();
    at = Math.max(0, Math.min(places.length - 1, (at ?? (far > 0 ? -1 : places.length)) + far));
    moved(places[at]);
  });
  picture.addEventListener("blur", () => { at = null; moved(null); });
}
