"use strict";
const stored = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
const figures = stored("figures");
const tint = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const touch = matchMedia("(pointer: coarse)").matches;

function power(exponent) {
  const digits = String(exponent).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
  return Math.abs(exponent) <= 3 ? String(Number(`1e${exponent}`)) : `10${digits}`;
}

// Whole powers of ten only, and not too many of them; inside one decade plotly's own ticks say more.
function decades(range) {
  const [low, high] = [Math.min(...range), Math.max(...range)];
  const step = Math.max(1, Math.ceil((high - low) / 6));
  const exponents = [];
  for (let e = Math.ceil(low); e <= high; e += step) exponents.push(e);
  if (exponents.length < 2) return { tickmode: "auto", nticks: 5 };
  return { tickmode: "array", tickvals: exponents.map((e) => Number(`1e${e}`)), ticktext: exponents.map(power) };
}

function dressedAxis(axis) {
  return {
    automargin: true, zeroline: false, gridcolor: tint("--grid"), linecolor: tint("--line"), tickcolor: tint("--line"),
    ...(axis.type === "log" ? decades(axis.range) : {}),
    ...axis,
    ...(axis.title ? { title: { standoff: 10, font: { size: 12.5 }, ...axis.title } } : {}),
  };
}

// Colours come from the style sheet, so that light and dark are decided in one place. A finger scrolls the page, so there
// it zooms by buttons; a mouse zooms by dragging, and a double click goes back.
function dressed(layout) {
  return {
    margin: { l: 8, r: 16, t: 26, b: 40 }, autosize: true, showlegend: false, dragmode: touch ? false : "zoom", hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: tint("--sans"), size: 12.5, color: tint("--soft") },
    hoverlabel: { bgcolor: tint("--card"), bordercolor: tint("--line"), font: { color: tint("--ink"), size: 13 }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: tint("--soft"), activecolor: tint("--accent") },
    ...layout,
    xaxis: dressedAxis(layout.xaxis),
    yaxis: dressedAxis(layout.yaxis),
  };
}

const buttons = { displaylogo: false, responsive: true, displayModeBar: touch ? true : "hover" };
buttons.modeBarButtons = [["zoomIn2d", "zoomOut2d", "pan2d", "resetScale2d"]];

// A rim in the colour of the paper keeps marks apart where they meet.
function dressedTrace(trace) {
  const rim = trace.mode === "markers" ? { line: { color: tint("--paper"), width: 1 } } : {};
  return { hoverinfo: trace.hovertext || trace.text ? "text" : "skip", ...trace, ...(trace.marker ? { marker: { ...rim, ...trace.marker } } : {}) };
}

function show(plot, data, layout) {
  const fresh = !plot.data;
  Plotly.react(plot, data.map(dressedTrace), dressed(layout), buttons);
  if (fresh) plot.on("plotly_relayout", () => retick(plot));
}

// Ticks that fit the whole range leave a zoomed logarithmic axis without any.
function retick(plot) {
  for (const side of ["xaxis", "yaxis"]) {
    const { type, range, tickmode, tickvals } = plot.layout[side];
    if (type !== "log") continue;
    const wanted = decades(range);
    const same = wanted.tickmode === tickmode && (tickmode !== "array" || String(wanted.tickvals) === String(tickvals));
    if (!same) Plotly.relayout(plot, Object.fromEntries(Object.entries(wanted).map(([key, value]) => [`${side}.${key}`, value])));
  }
}

const painters = {}; // plots that are not in `figures` say here how they are drawn

function draw(plot) {
  if (plot.closest("[hidden]")) return; // has no width yet
  if (plot.id in painters) painters[plot.id](plot);
  else show(plot, figures[plot.id].data, figures[plot.id].layout);
}

const drawAll = () => document.querySelectorAll(".plot").forEach(draw);

document.querySelectorAll("select[data-panels]").forEach((select) => {
  select.addEventListener("change", () => {
    for (const panel of document.getElementById(select.dataset.panels).children) {
      panel.hidden = panel.dataset.panel !== select.value;
      panel.querySelectorAll(".plot").forEach(draw);
    }
  });
});

document.querySelectorAll("button[data-copy]").forEach((button) => {
  button.addEventListener("click", () => {
    // A page opened from disk may not use the clipboard interface; copying a selection always works.
    getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
    button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
});

// Tables sort by the numbers behind their texts; a second click turns the order round, blanks stay last.
document.querySelectorAll("table.sortable").forEach((table) => {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const rising = head.ariaSort !== "ascending";
    heads.forEach((other) => { other.ariaSort = other === head ? (rising ? "ascending" : "descending") : "none"; });
    const value = (row) => {
      const given = row.cells[column].dataset.value;
      return given === undefined ? row.cells[column].textContent : given === "" ? null : Number(given);
    };
    const compare = (a, b) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true })) * (rising ? 1 : -1);
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
  }));
});
