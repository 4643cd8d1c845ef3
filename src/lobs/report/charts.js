"use strict";
// Charts as inline SVG: bars, lines and marks on linear or logarithmic axes. Texts are set as text, never as HTML.
const stored = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
const figures = stored("figures");
const tint = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const touch = matchMedia("(pointer: coarse)").matches;
const FONT = 12.5;

// The name space is read from an element, so that the page holds no address at all.
const SVG = document.getElementById("namespace").namespaceURI;

function node(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

const pen = document.createElement("canvas").getContext("2d");
function textWidth(text) {
  pen.font = `${FONT}px ${tint("--sans")}`;
  return pen.measureText(text).width;
}

function cutTo(text, room) {
  if (textWidth(text) <= room) return text;
  let end = text.length;
  while (end > 1 && textWidth(`${text.slice(0, end)}…`) > room) end -= 1;
  return `${text.slice(0, end)}…`;
}

function power(exponent) {
  const digits = String(exponent).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
  return Math.abs(exponent) <= 3 ? String(Number(`1e${exponent}`)) : `10${digits}`;
}

// Whole powers of ten; within less than two decades also twos and fives.
function logTicks(low, high, room) {
  const few = high - low < 1.5;
  const step = Math.max(1, Math.ceil((high - low) / Math.max(2, Math.min(6, room / 60))));
  const ticks = [];
  for (let e = Math.floor(low); e <= high; e += few ? 1 : step) {
    for (const digit of few ? [1, 2, 5] : [1]) {
      const place = e + Math.log10(digit);
      if (place >= low - 1e-9 && place <= high + 1e-9) ticks.push([place, digit === 1 ? power(e) : String(Number(`${digit}e${e}`))]);
    }
  }
  return ticks;
}

function linearTicks(low, high, room) {
  const rough = (high - low) / Math.max(2, Math.min(6, room / 70));
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((x) => x * size >= rough) * size;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) {
    ticks.push([k * step, Number((k * step).toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6 })]);
  }
  return ticks;
}

// An axis maps values to its own scale (logarithms where it is logarithmic) and that scale to pixels.
class Axis {
  constructor(spec, view, start, stop) {
    Object.assign(this, { spec, start, stop, low: view[0], high: view[1] });
  }
  scale(value) { return this.spec.type === "log" ? Math.log10(value) : value; }
  place(scaled) { return this.start + ((scaled - this.low) / (this.high - this.low)) * (this.stop - this.start); }
  at(value) { return this.place(this.scale(value)); }
  scaleAt(pixel) { return this.low + ((pixel - this.start) / (this.stop - this.start)) * (this.high - this.low); }
  ticks() {
    const [low, high] = [Math.min(this.low, this.high), Math.max(this.low, this.high)];
    const room = Math.abs(this.stop - this.start);
    if (this.spec.tickvals) return this.spec.tickvals.map((value, i) => [value, this.spec.ticktext[i]]).filter(([v]) => v >= low && v <= high);
    return this.spec.type === "log" ? logTicks(low, high, room) : linearTicks(low, high, room);
  }
}

function wholeView(spec, values) {
  if (spec.range) return spec.range;
  const known = values.filter((x) => x !== null && x !== undefined && (spec.type !== "log" || x > 0)).map((x) => (spec.type === "log" ? Math.log10(x) : x));
  let [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  if (spec.rangemode === "tozero") low = Math.min(0, low);
  const margin = 0.05 * (high - low || 1);
  return [low === 0 ? 0 : low - margin, high + margin];
}

const barEnds = (trace) => trace.x.map((x, i) => (x === null ? null : x + (trace.base?.[i] ?? 0)));

function paint(plot, figure) {
  Object.assign(plot, figure);
  const { data, layout } = figure;
  const width = plot.clientWidth;
  const height = layout.height;
  const guide = layout.guide;
  plot.whole = {
    x: wholeView(layout.xaxis, [...data.flatMap((t) => (t.type === "bar" ? barEnds(t) : t.x)), ...(guide ? [guide.x] : [])]),
    y: wholeView(layout.yaxis, data.flatMap((t) => t.y)),
  };
  plot.view = plot.zoom ?? plot.whole;
  const labels = layout.yaxis.ticktext ?? new Axis(layout.yaxis, plot.view.y, height, 0).ticks().map(([, text]) => text);
  const left = Math.min(Math.max(...labels.map(textWidth), 8) + 10, 0.42 * width);
  const right = 14 + Math.max(0, ...data.flatMap((t) => (t.textposition === "outside" ? t.text.map(textWidth) : [])));
  const [top, bottom] = [(layout.yaxis.title ? 24 : 8) + (guide ? 16 : 0), layout.xaxis.title ? 44 : 26];
  plot.area = { left, top, right: width - right, bottom: height - bottom };
  plot.axes = { x: new Axis(layout.xaxis, plot.view.x, left, width - right), y: new Axis(layout.yaxis, plot.view.y, height - bottom, top) };
  if (layout.yaxis.tickvals) plot.axes.y = new Axis(layout.yaxis, [plot.view.y[1], plot.view.y[0]], top, height - bottom);
  const svg = node("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  plot.spots = [];
  drawAxes(svg, plot, left);
  const box = plot.area;
  const frame = { x: box.left, y: box.top - 8, width: Math.max(0, box.right - box.left), height: box.bottom - box.top + 16 };
  const inside = node("svg", { ...frame, viewBox: `${frame.x} ${frame.y} ${frame.width} ${frame.height}`, overflow: "hidden" }, svg);
  const bars = data.filter((t) => t.type === "bar");
  bars.forEach((trace, i) => drawBars(inside, svg, plot, trace, i, bars.length));
  data.filter((t) => t.mode === "lines").forEach((trace) => drawLine(inside, plot, trace));
  if (guide) drawGuide(svg, plot, guide);
  data.filter((t) => t.mode === "markers").forEach((trace) => drawMarks(inside, plot, trace));
  plot.hover = (px, py) => nearest(plot.spots, px, py);
  place(plot, svg, height);
}

function drawAxes(svg, plot, room) {
  const { x, y } = plot.axes;
  const box = plot.area;
  for (const [scaled, text] of x.ticks()) {
    const at = x.place(scaled);
    node("line", { x1: at, x2: at, y1: box.top, y2: box.bottom, class: "rule" }, svg);
    node("text", { x: at, y: box.bottom + 16, "text-anchor": "middle", class: "xtick" }, svg, text);
  }
  const rows = Boolean(y.spec.tickvals);
  for (const [scaled, text] of y.ticks()) {
    const at = y.place(scaled);
    if (!rows || y.spec.showgrid) node("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: "rule" }, svg);
    const label = node("text", { x: box.left - 8, y: at + 4, "text-anchor": "end", class: "ytick" }, svg, cutTo(text, room - 8));
    if (label.textContent !== text) node("title", {}, label, text);
  }
  node("line", { x1: box.left, x2: box.left, y1: box.top, y2: box.bottom, class: "axis" }, svg);
  if (x.spec.title) node("text", { x: (box.left + box.right) / 2, y: box.bottom + 36, "text-anchor": "middle" }, svg, x.spec.title.text);
  if (y.spec.title) node("text", { x: 0, y: 12 }, svg, y.spec.title.text);
}

function drawBars(inside, svg, plot, trace, index, count) {
  const { x, y } = plot.axes;
  const slot = (Math.abs(y.at(1) - y.at(0)) * (1 - (plot.layout.bargap ?? 0.3))) / count;
  trace.x.forEach((value, i) => {
    if (value === null || value === undefined) return;
    const from = trace.base ? x.at(trace.base[i]) : x.spec.type === "log" ? plot.area.left : x.at(0);
    const to = x.at(value + (trace.base?.[i] ?? 0));
    const top = y.at(trace.y[i]) + slot * (index - count / 2);
    const colour = Array.isArray(trace.marker.color) ? trace.marker.color[i] : trace.marker.color;
    const box = { x: Math.min(from, to), y: top + 0.5, width: Math.max(1, Math.abs(to - from)), height: Math.max(1, slot - 1) };
    node("rect", { ...box, fill: colour, rx: Math.min(2, slot / 4), class: "bar" }, inside);
    if (trace.textposition === "outside" && top > plot.area.top - slot && top < plot.area.bottom) {
      node("text", { x: Math.min(Math.max(from, to), plot.area.right) + 6, y: top + slot / 2 + 4, class: "value" }, svg, trace.text[i]);
    }
    plot.spots.push({ ...box, x: plot.area.left, width: plot.area.right - plot.area.left, text: trace.hovertext?.[i] });
  });
}

function drawLine(inside, plot, trace) {
  const { x, y } = plot.axes;
  let path = "";
  let on = false;
  const points = trace.x.map((value, i) => (trace.y[i] === null || trace.y[i] === undefined ? null : [x.at(value), y.at(trace.y[i])]));
  points.forEach((point, i) => {
    if (point && on && trace.line.shape === "hv") path += `H${point[0]}`;
    if (point) path += `${on ? "L" : "M"}${point[0].toFixed(2)} ${point[1].toFixed(2)}`;
    on = Boolean(point);
    if (point && trace.hovertext?.[i]) plot.spots.push({ x: point[0], y: point[1], reach: 40, text: trace.hovertext[i] });
  });
  const ends = points.filter(Boolean);
  if (trace.fill && ends.length) {
    node("path", { d: `${path}V${y.at(0)}H${ends[0][0]}Z`, fill: trace.line.color, opacity: 0.22 }, inside);
  }
  const dash = trace.line.dash === "dot" ? { "stroke-dasharray": "2 4", "stroke-linecap": "round" } : {};
  node("path", { d: path || "M0 0", fill: "none", stroke: trace.line.color, "stroke-width": trace.line.width, "stroke-linejoin": "round", ...dash, class: "line" }, inside);
}

// A rim in the colour of the page separates marks that overlap.
function drawMarks(inside, plot, trace) {
  const { x, y } = plot.axes;
  trace.x.forEach((value, i) => {
    if (value === null || value === undefined || trace.y[i] === null || trace.y[i] === undefined) return;
    const size = (trace.marker.size ?? 11) / 12;
    const [px, py] = [x.at(value), y.at(trace.y[i])];
    const rim = trace.marker.line ?? { color: tint("--paper"), width: 1 };
    node("path", {
      d: trace.marker.path, fill: trace.marker.color, stroke: rim.color, "stroke-width": rim.width / size, class: "mark",
      transform: `translate(${px} ${py}) scale(${size}) translate(-6 -6)`,
    }, inside);
    plot.spots.push({ x: px, y: py, reach: 24, text: trace.hovertext?.[i] });
  });
}

function drawGuide(svg, plot, guide) {
  const at = plot.axes.x.at(guide.x);
  if (at < plot.area.left || at > plot.area.right + 1) return;
  node("line", { x1: at, x2: at, y1: plot.area.top - 6, y2: plot.area.bottom, class: "guide" }, svg);
  const half = textWidth(guide.text) / 2;
  const middle = Math.max(half, Math.min(plot.clientWidth - half, at));
  node("text", { x: middle, y: plot.area.top - 11, "text-anchor": "middle", class: "value" }, svg, guide.text);
}

function nearest(spots, px, py) {
  let [found, least] = [null, Infinity];
  for (const spot of spots) {
    if (!spot.text) continue;
    const round = spot.reach !== undefined;
    const within = !round && px >= spot.x && px <= spot.x + spot.width && py >= spot.y && py <= spot.y + spot.height;
    const distance = round ? Math.hypot(spot.x - px, spot.y - py) : within ? 30 : Infinity;
    if (distance < least && (!round || distance <= spot.reach)) [found, least] = [spot, distance];
  }
  return found?.text ?? null;
}

function place(plot, drawing, height) {
  plot.querySelector(".chart")?.remove();
  plot.style.height = `${height}px`;
  plot.prepend(drawing);
  if (!plot.dataset.ready) enliven(plot);
  const reset = plot.querySelector("[data-zoom=reset]");
  if (reset) reset.hidden = !plot.zoom;
  plot.style.touchAction = plot.zoom ? "none" : "";
}

const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);

function showTip(plot, event) {
  const frame = plot.getBoundingClientRect();
  const text = plot.hover?.(event.clientX - frame.left, event.clientY - frame.top);
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const [w, h] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = `${Math.max(4, Math.min(innerWidth - w - 4, event.clientX + 14))}px`;
  tip.style.top = `${event.clientY - h - 12 < 4 ? event.clientY + 18 : event.clientY - h - 12}px`;
}

// A mouse zooms by dragging and resets by a double click. A finger scrolls the page, so there buttons zoom, and a finger
// moves what is zoomed.
function enliven(plot) {
  plot.dataset.ready = "yes";
  const frame = document.createElement("div");
  frame.className = "selection";
  frame.hidden = true;
  plot.append(frame, zoomButtons(plot));
  let start = null;
  const local = (event) => {
    const box = plot.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  plot.addEventListener("pointerdown", (event) => {
    if (event.target.closest("button")) return;
    if (event.pointerType === "mouse" ? event.button === 0 : plot.zoom) start = { at: local(event), view: plot.view };
  });
  plot.addEventListener("pointermove", (event) => {
    showTip(plot, event);
    if (!start) return;
    const now = local(event);
    if (event.pointerType === "mouse") outline(frame, plot, start.at, now);
    else panned(plot, start, now);
  });
  addEventListener("pointerup", (event) => {
    if (start && event.pointerType === "mouse" && !frame.hidden) zoomInto(plot, start.at, local(event));
    frame.hidden = true;
    start = null;
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = true; });
  plot.addEventListener("dblclick", () => { plot.zoom = null; draw(plot); });
}

function outline(frame, plot, [ax, ay], [bx, by]) {
  const box = plot.area;
  const [left, right] = [Math.max(box.left, Math.min(ax, bx)), Math.min(box.right, Math.max(ax, bx))];
  const [top, bottom] = [Math.max(box.top, Math.min(ay, by)), Math.min(box.bottom, Math.max(ay, by))];
  frame.hidden = right - left < 6 && bottom - top < 6;
  Object.assign(frame.style, { left: `${left}px`, top: `${top}px`, width: `${Math.max(0, right - left)}px`, height: `${Math.max(0, bottom - top)}px` });
}

function between(axis, view, a, b) {
  const low = axis.scaleAt(Math.max(Math.min(a, b), Math.min(axis.start, axis.stop)));
  const high = axis.scaleAt(Math.min(Math.max(a, b), Math.max(axis.start, axis.stop)));
  const rising = view[0] <= view[1];
  return rising ? [Math.min(low, high), Math.max(low, high)] : [Math.max(low, high), Math.min(low, high)];
}

function zoomInto(plot, [ax, ay], [bx, by]) {
  plot.zoom = {
    x: Math.abs(ax - bx) < 6 ? plot.view.x : between(plot.axes.x, plot.view.x, ax, bx),
    y: Math.abs(ay - by) < 6 ? plot.view.y : between(plot.axes.y, plot.view.y, ay, by),
  };
  draw(plot);
}

function panned(plot, start, [px, py]) {
  const shifted = (axis, view, pixels) => {
    const shift = (pixels / (axis.stop - axis.start)) * (axis.high - axis.low);
    return view.map((x) => x - shift);
  };
  plot.zoom = { x: shifted(plot.axes.x, start.view.x, px - start.at[0]), y: shifted(plot.axes.y, start.view.y, py - start.at[1]) };
  draw(plot);
}

function zoomButtons(plot) {
  const bar = document.createElement("div");
  bar.className = "zoom";
  const scaled = ([a, b], factor) => [(a + b) / 2 - ((b - a) / 2) * factor, (a + b) / 2 + ((b - a) / 2) * factor];
  const actions = {
    in: ["+", "Zoom in", () => ({ x: scaled(plot.view.x, 0.6), y: scaled(plot.view.y, 0.6) })],
    out: ["−", "Zoom out", () => ({ x: scaled(plot.view.x, 1 / 0.6), y: scaled(plot.view.y, 1 / 0.6) })],
    reset: ["↺", "Show all", () => null],
  };
  for (const [name, [sign, title, view]] of Object.entries(actions)) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: sign, title, hidden: name === "reset" });
    button.dataset.zoom = name;
    button.addEventListener("click", () => { plot.zoom = view(); draw(plot); });
    bar.append(button);
  }
  return bar;
}

const painters = {}; // how plots are drawn that are not in `figures`

function draw(plot) {
  if (plot.closest("[hidden]") || !plot.clientWidth) return; // has no width yet
  if (plot.id in painters) painters[plot.id](plot);
  else paint(plot, figures[plot.id]);
}

const drawAll = () => document.querySelectorAll(".plot").forEach(draw);
