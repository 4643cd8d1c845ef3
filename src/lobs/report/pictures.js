const levels = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const signed = (text) => new Int8Array(levels(text).buffer);
const blank = { showgrid: false, showticklabels: false, ticks: "", zeroline: false, showline: false };

// A heat map whose cells are square, drawn from the top; what is null shows the paper.
function picture(plot, z, text, scale, limits, top = 26) {
  const [rows, columns] = [z.length, z[0].length];
  const width = plot.clientWidth || 300;
  const height = Math.min(Math.round((width * rows) / columns), 620) + top + 6;
  plot.style.minHeight = `${height}px`;
  show(plot, [{ type: "heatmap", z, text, colorscale: scale, zmin: limits[0], zmax: limits[1], showscale: false, xgap: 0, ygap: 0 }], {
    height, margin: { l: 4, r: 4, t: top, b: 2 },
    xaxis: { ...blank, range: [-0.5, columns - 0.5], constrain: "domain" },
    yaxis: { ...blank, range: [rows - 0.5, -0.5], scaleanchor: "x", constrain: "domain" },
  });
}

const cut = (values, columns) => Array.from({ length: values.length / columns }, (_, i) => Array.from(values.slice(i * columns, (i + 1) * columns)));

const pixels = stored("pixels");
if (pixels) {
  const columns = pixels.size[1];
  painters["pixels-mean"] = (plot) => {
    const z = cut(levels(pixels.mean), columns);
    picture(plot, z, z.map((row, i) => row.map((_, j) => `row ${i + 1}, column ${j + 1}`)), [[0, tint("--card")], [1, tint("--ink")]], [0, 255]);
  };
  pixels.runs.forEach((run, index) => {
    painters[`pixels-${index}`] = (plot) => {
      const shares = cut(levels(run.share), columns);
      const largest = Math.max(1, ...shares.flat());
      const text = shares.map((row, i) => row.map((x, j) => `row ${i + 1}, column ${j + 1}<br>${x ? `${(x / 2.55).toPrecision(2)} % of its uses are left` : "not read"}`));
      picture(plot, shares.map((row) => row.map((x) => x || null)), text, [[0, tint("--low")], [1, tint("--accent")]], [0, largest]);
    };
  });
}

// Filters side by side, as many a row as fit: the channels of one filter stay together.
function sheet({ filters, channels, kernel, scale }, bits) {
  const [kh, kw] = kernel;
  const across = Math.max(1, Math.min(filters, Math.floor(16 / channels)));
  const gap = 1;
  const wide = channels * (kw + gap) + 2 * gap;
  const z = Array.from({ length: Math.ceil(filters / across) * (kh + 3 * gap) - 3 * gap }, () => new Array(across * wide - 3 * gap).fill(null));
  const text = z.map((row) => row.map(() => ""));
  bits.forEach((value, place) => {
    const x = place % kw, y = Math.floor(place / kw) % kh, channel = Math.floor(place / (kw * kh)) % channels, filter = Math.floor(place / (kw * kh * channels));
    const row = Math.floor(filter / across) * (kh + 3 * gap) + y, column = (filter % across) * wide + channel * (kw + gap) + x;
    z[row][column] = value === -128 ? null : value;
    text[row][column] = `filter ${filter + 1}, channel ${channel + 1}, (${y + 1}, ${x + 1})<br>${value === -128 ? "removed" : ((value / 127) * scale).toPrecision(3)}`;
  });
  return [z, text];
}

(stored("gallery") ?? []).forEach((layer, index) => {
  layer.sheets.forEach(({ bits }, run) => {
    painters[`gallery-${index}-${run}`] = (plot) => {
      const [z, text] = sheet(layer, signed(bits));
      picture(plot, z, text, [[0, tint("--minus")], [0.5, tint("--middle")], [1, tint("--plus")]], [-127, 127]);
    };
  });
});

drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
