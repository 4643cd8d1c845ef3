const preview = stored("preview");

if (preview) {
  const slider = document.getElementById("budget");
  const lead = preview.runs[0];
  const write = (id, text) => { document.getElementById(id).textContent = text; };
  const percent = (share) => `${digits(100 * share, 3)} %`;
  const sum = (values) => values.reduce((a, b) => a + (b ?? 0), 0);
  // Changes are shares of the dense output where every run knows its norm; otherwise they are absolute.
  const relative = preview.runs.every((run) => run.norm);
  const changeText = (value) => (relative && value !== null && value !== undefined ? percent(value) : digits(value));

  function digits(value, count = 4) {
    if (value === null || value === undefined) return "–";
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(count - 1);
    return Number(value.toPrecision(count)).toLocaleString("en", { maximumSignificantDigits: count });
  }

  const keptShare = (run, stop) => 1 - sum(run.removed.map((row) => row?.[stop])) / sum(run.totals);
  for (const run of preview.runs) {
    run.shares = run.change.map((_, stop) => keptShare(run, stop));
    const unit = relative ? run.norm : 1;
    run.moved = run.change.map((x) => (x === null ? null : x / unit));
    run.measuredMoved = run.measured === null ? null : run.measured / unit;
  }

  // Every stop is a budget that was allocated, so nothing is interpolated. Other runs show their nearest stop.
  function closest(run, share) {
    const distance = (x) => Math.abs(Math.log((x + 1e-9) / (share + 1e-9)));
    let best = 0;
    run.shares.forEach((x, stop) => { if (distance(x) < distance(run.shares[best])) best = stop; });
    return best;
  }
  const stopOf = (run) => (run === lead ? Number(slider.value) : closest(run, lead.shares[Number(slider.value)]));

  const places = preview.layers.map((_, i) => i);
  const rows = { tickvals: places, ticktext: preview.labels, range: [places.length - 0.5, -0.5] };
  const height = 60 + Math.max(places.length * (14 * preview.runs.length + 14), 90);

  function keptBars(run) {
    const stop = stopOf(run);
    const left = (i) => run.totals[i] - run.removed[i][stop];
    return {
      type: "bar", y: places, marker: { color: run.colour },
      x: places.map((i) => (run.removed[i] ? 100 * (1 - run.removed[i][stop] / Math.max(1, run.totals[i])) : null)),
      hovertext: places.map((i) => (run.removed[i] ? `${preview.layers[i]}\n${run.label}: ${left(i).toLocaleString("en")} of ${run.totals[i].toLocaleString("en")}` : "")),
    };
  }

  function errorMarks(run) {
    const stop = stopOf(run);
    return {
      mode: "markers", y: places, marker: { color: run.colour, path: run.path },
      x: places.map((i) => 100 * run.errors[i]?.[stop] || null),
      hovertext: places.map((i) => `${preview.layers[i]}\n${run.label}: predicted ${percent(run.errors[i]?.[stop] ?? 0)}`),
    };
  }

  const logs = (values) => values.filter((x) => x > 0).map(Math.log10);
  // Stops at which almost nothing is removed would leave no room for the others.
  function span(values, depth) {
    const found = logs(values);
    const high = found.length ? Math.max(...found) : 0;
    const low = found.length ? Math.max(Math.min(...found), high - depth) : -1;
    return [Math.floor(low - 0.05), Math.ceil(high + 0.05)];
  }
  const unit = relative ? 100 : 1;
  const errorRange = span(preview.runs.flatMap((run) => run.errors.flatMap((row) => (row ?? []).map((x) => 100 * x))), 5);
  const changeRange = span(preview.runs.flatMap((run) => [...run.moved, run.measuredMoved]).map((x) => unit * x), 4);
  const shares = logs(preview.runs.flatMap((run) => run.shares.map((x) => 100 * x)));

  function changeLines() {
    const lines = preview.runs.map((run) => ({
      mode: "lines", x: run.shares.map((x) => 100 * x), y: run.moved.map((x) => unit * x || null), line: { color: run.colour, width: 2 },
      hovertext: run.shares.map((x, i) => `${run.label}: ${percent(x)} kept\npredicted ${changeText(run.moved[i])}`),
    }));
    const measured = preview.runs.filter((run) => run.measured).map((run) => ({
      mode: "markers", x: [100 * run.shares[run.at]], y: [unit * run.measuredMoved], marker: { color: run.colour, path: preview.cross },
      hovertext: [`${run.label}: measured ${changeText(run.measuredMoved)}\n${percent(run.shares[run.at])} kept`],
    }));
    const here = preview.runs.map((run) => ({
      mode: "markers", x: [100 * run.shares[stopOf(run)]], y: [unit * run.moved[stopOf(run)] || null],
      marker: { color: tint("--paper"), path: preview.ring, size: 13, line: { color: run.colour, width: 3 } },
      hovertext: [`${run.label}: predicted ${changeText(run.moved[stopOf(run)])}`],
    }));
    return [...lines, ...here, ...measured];
  }

  painters["what-if-kept"] = (plot) => paint(plot, {
    data: preview.runs.map(keptBars), layout: { height, xaxis: { title: { text: "weights kept (%)" }, range: [0, 100] }, yaxis: rows },
  });
  painters["what-if-errors"] = (plot) => paint(plot, {
    data: preview.runs.map(errorMarks).reverse(),
    layout: { height, xaxis: { title: { text: "predicted relative error (%)" }, type: "log", range: errorRange }, yaxis: { ...rows, showgrid: true } },
  });
  painters["what-if-change"] = (plot) => paint(plot, {
    data: changeLines(),
    layout: {
      height: 300, xaxis: { title: { text: "weights kept (%)" }, type: "log", range: [Math.max(...shares) + 0.05, Math.min(...shares) - 0.05] },
      yaxis: { title: { text: relative ? "change of the output (% of its norm)" : "change of the output" }, type: "log", range: changeRange },
    },
  });

  function describe() {
    const stop = Number(slider.value);
    const total = sum(lead.totals);
    const kept = total - sum(lead.removed.map((row) => row?.[stop]));
    write("budget-share", percent(kept / total));
    write("budget-count", `${kept.toLocaleString("en")} of ${total.toLocaleString("en")} weights`);
    write("budget-change", changeText(lead.moved[stop]));
    slider.setAttribute("aria-valuetext", `${percent(kept / total)} kept`);
    const ran = stop === lead.at;
    const measured = lead.measured === null ? "" : ` Measured: ${changeText(lead.measuredMoved)}.`;
    write("budget-place", ran ? `This is the budget that was run.${measured}` : "This budget was not run: the change is predicted, not measured.");
    document.getElementById("budget-back").disabled = ran;
    const code = document.getElementById("budget-code");
    if (code) code.textContent = `lobs.prune(model, batches, keep=${Number((kept / total).toPrecision(6))})`;
  }

  function move() {
    describe();
    ["what-if-kept", "what-if-errors", "what-if-change"].forEach((id) => draw(document.getElementById(id)));
  }

  slider.max = lead.change.length - 1;
  slider.value = lead.at;
  slider.addEventListener("input", move);
  document.getElementById("budget-back").addEventListener("click", () => { slider.value = lead.at; move(); });
  describe();
}
