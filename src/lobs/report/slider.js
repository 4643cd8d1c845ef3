const outlook = stored("outlook");

if (outlook) {
  const slider = document.getElementById("budget");
  const lead = outlook.runs[0];
  const say = (id, text) => { document.getElementById(id).textContent = text; };
  const percent = (share) => `${digits(100 * share, 3)} %`;
  const sum = (values) => values.reduce((a, b) => a + (b ?? 0), 0);

  function digits(value, count = 4) {
    if (value === null || value === undefined) return "–";
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(count - 1);
    return Number(value.toPrecision(count)).toLocaleString("en", { maximumSignificantDigits: count });
  }

  const keptShare = (run, stop) => 1 - sum(run.removed.map((row) => row?.[stop])) / sum(run.totals);
  for (const run of outlook.runs) run.shares = run.change.map((_, stop) => keptShare(run, stop));

  // Every stop is a budget that was really shared out, so nothing is interpolated; other runs show their nearest one.
  function nearest(run, share) {
    let best = 0;
    run.shares.forEach((x, stop) => { if (Math.abs(Math.log((x + 1e-9) / (share + 1e-9))) < Math.abs(Math.log((run.shares[best] + 1e-9) / (share + 1e-9)))) best = stop; });
    return best;
  }
  const stopOf = (run) => (run === lead ? Number(slider.value) : nearest(run, lead.shares[Number(slider.value)]));

  const places = outlook.layers.map((_, i) => i);
  const rows = { tickvals: places, ticktext: outlook.labels, range: [places.length - 0.5, -0.5], showgrid: false, ticklabelstandoff: 6 };
  const height = 80 + Math.max(places.length * (14 * outlook.runs.length + 14), 90);
  const keptAt = (run, stop, i) => (run.removed[i] ? 1 - run.removed[i][stop] / Math.max(1, run.totals[i]) : null);

  function keptBars(run) {
    const stop = stopOf(run);
    return {
      type: "bar", orientation: "h", y: places, marker: { color: run.colour },
      x: places.map((i) => (run.removed[i] ? 100 * keptAt(run, stop, i) : null)),
      hovertext: places.map((i) => (run.removed[i] ? `${outlook.layers[i]}<br>${run.label}: ${(run.totals[i] - run.removed[i][stop]).toLocaleString("en")} of ${run.totals[i].toLocaleString("en")}` : "")),
    };
  }

  function errorMarks(run) {
    const stop = stopOf(run);
    return {
      type: "scatter", mode: "markers", y: places, marker: { color: run.colour, symbol: run.symbol, size: 11 },
      x: places.map((i) => run.errors[i]?.[stop] || null),
      hovertext: places.map((i) => `${outlook.layers[i]}<br>${run.label}: predicted ${digits(run.errors[i]?.[stop])}`),
    };
  }

  const logs = (values) => values.filter((x) => x > 0).map(Math.log10);
  // Extremes near nothing removed would leave no room for what matters.
  function span(values, depth) {
    const found = logs(values);
    const high = found.length ? Math.max(...found) : 0;
    const low = found.length ? Math.max(Math.min(...found), high - depth) : -1;
    return [Math.floor(low - 0.05), Math.ceil(high + 0.05)];
  }
  const errorRange = span(outlook.runs.flatMap((run) => run.errors.flatMap((row) => row ?? [])), 5);
  const changeRange = span(outlook.runs.flatMap((run) => [...run.change, run.measured]), 4);
  const shares = logs(outlook.runs.flatMap((run) => run.shares.map((x) => 100 * x)));

  function changeLines() {
    const lines = outlook.runs.map((run) => ({
      type: "scatter", mode: "lines", x: run.shares.map((x) => 100 * x), y: run.change.map((x) => x || null),
      line: { color: run.colour, width: 2 }, hovertext: run.shares.map((x, i) => `${run.label}: ${percent(x)} kept<br>predicted ${digits(run.change[i])}`),
    }));
    const measured = outlook.runs.filter((run) => run.measured).map((run) => ({
      type: "scatter", mode: "markers", x: [100 * run.shares[run.at]], y: [run.measured],
      marker: { color: run.colour, size: 12, symbol: "x" }, hovertext: [`${run.label}: measured ${digits(run.measured)}<br>${percent(run.shares[run.at])} kept`],
    }));
    const here = outlook.runs.map((run) => ({
      type: "scatter", mode: "markers", x: [100 * run.shares[stopOf(run)]], y: [run.change[stopOf(run)] || null],
      marker: { color: tint("--paper"), size: 13, line: { color: run.colour, width: 3 } },
      hovertext: [`${run.label}: predicted ${digits(run.change[stopOf(run)])}`],
    }));
    return [...lines, ...here, ...measured];
  }

  painters["what-if-kept"] = (plot) => show(plot, outlook.runs.map(keptBars), { height, bargap: 0.3, xaxis: { title: { text: "weights kept (%)" }, range: [0, 100] }, yaxis: rows });
  painters["what-if-errors"] = (plot) => show(plot, outlook.runs.map(errorMarks).reverse(), {
    height, xaxis: { title: { text: "predicted relative error" }, type: "log", range: errorRange }, yaxis: { ...rows, showgrid: true },
  });
  painters["what-if-change"] = (plot) => show(plot, changeLines(), {
    height: 300, xaxis: { title: { text: "weights kept (%)" }, type: "log", range: [Math.max(...shares) + 0.05, Math.min(...shares) - 0.05] },
    yaxis: { title: { text: "change of the output" }, type: "log", range: changeRange },
  });

  function tell() {
    const stop = Number(slider.value);
    const total = sum(lead.totals);
    const kept = total - sum(lead.removed.map((row) => row?.[stop]));
    say("budget-share", percent(kept / total));
    say("budget-count", `${kept.toLocaleString("en")} of ${total.toLocaleString("en")} weights`);
    say("budget-change", digits(lead.change[stop]));
    slider.setAttribute("aria-valuetext", `${percent(kept / total)} kept`);
    const ran = stop === lead.at;
    const measured = lead.measured === null ? "" : ` Measured: ${digits(lead.measured)}.`;
    say("budget-place", ran ? `This is the budget that was run.${measured}` : "A budget that was not run: predicted, not measured.");
    document.getElementById("budget-back").disabled = ran;
    const code = document.getElementById("budget-code");
    if (code) code.textContent = `lobs.prune(model, batches, lobs.Sparsity(${Number((1 - kept / total).toPrecision(6))}))`;
  }

  function move() {
    tell();
    ["what-if-kept", "what-if-errors", "what-if-change"].forEach((id) => draw(document.getElementById(id)));
  }

  slider.max = lead.change.length - 1;
  slider.value = lead.at;
  slider.addEventListener("input", move);
  document.getElementById("budget-back").addEventListener("click", () => { slider.value = lead.at; move(); });
  tell();
}
