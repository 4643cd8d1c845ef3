"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const tint = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function power(exponent) {
  const digits = String(exponent).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
  return Math.abs(exponent) <= 3 ? String(Number(`1e${exponent}`)) : `10${digits}`;
}

// Whole powers of ten only, and not too many of them.
function decades([low, high]) {
  const step = Math.max(1, Math.ceil((high - low) / 6));
  const exponents = [];
  for (let e = Math.ceil(low); e <= high; e += step) exponents.push(e);
  return { tickvals: exponents.map((e) => Number(`1e${e}`)), ticktext: exponents.map(power) };
}

// Fixed ranges leave a finger free to scroll the page.
function dressedAxis(axis) {
  return {
    automargin: true, fixedrange: true, zeroline: false,
    gridcolor: tint("--grid"), linecolor: tint("--line"), tickcolor: tint("--line"),
    ...(axis.type === "log" ? decades(axis.range) : {}),
    ...axis,
    ...(axis.title ? { title: { standoff: 10, font: { size: 12.5 }, ...axis.title } } : {}),
  };
}

// Colours come from the style sheet, so that light and dark are decided in one place.
function dressed(layout) {
  return {
    margin: { l: 8, r: 16, t: 8, b: 40 }, autosize: true, showlegend: false, dragmode: false, hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: tint("--sans"), size: 12.5, color: tint("--soft") },
    hoverlabel: { bgcolor: tint("--card"), bordercolor: tint("--line"), font: { color: tint("--ink"), size: 13 }, align: "left" },
    ...layout,
    xaxis: dressedAxis(layout.xaxis),
    yaxis: dressedAxis(layout.yaxis),
  };
}

// A rim in the colour of the paper keeps marks apart where they meet.
function dressedTrace(trace) {
  const rim = trace.mode === "markers" ? { line: { color: tint("--paper"), width: 1 } } : {};
  return { hoverinfo: trace.hovertext ? "text" : "skip", ...trace, ...(trace.marker ? { marker: { ...trace.marker, ...rim } } : {}) };
}

function draw(plot) {
  if (plot.closest("[hidden]")) return; // has no width yet
  const { data, layout } = figures[plot.id];
  Plotly.react(plot, data.map(dressedTrace), dressed(layout), { displayModeBar: false, responsive: true });
}

const drawAll = () => document.querySelectorAll(".plot").forEach(draw);
drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

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
