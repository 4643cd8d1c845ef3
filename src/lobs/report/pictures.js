const levels = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const signed = (text) => new Int8Array(levels(text).buffer);

// A heat map of square cells on a canvas, drawn from the top. A cell that is null shows the page.
function picture(plot, z, text, colour) {
  const [rows, columns] = [z.length, z[0].length];
  plot.data = [{ z, text }];
  plot.whole = { x: [0, columns], y: [0, rows] };
  plot.view = plot.zoom ?? plot.whole;
  const width = plot.clientWidth;
  const cell = Math.min(width / columns, 620 / rows);
  const [wide, high] = [Math.max(1, Math.round(cell * columns)), Math.max(1, Math.round(cell * rows))];
  plot.area = { left: 0, top: 0, right: wide, bottom: high };
  plot.axes = { x: new Axis({}, plot.view.x, 0, wide), y: new Axis({}, plot.view.y, 0, high) };
  const sharp = Math.max(1, devicePixelRatio);
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { className: "chart", width: wide * sharp, height: high * sharp });
  Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
  const brush = canvas.getContext("2d");
  const { x, y } = plot.axes;
  for (let i = Math.max(0, Math.floor(y.low)); i < Math.min(rows, Math.ceil(y.high)); i += 1) {
    for (let j = Math.max(0, Math.floor(x.low)); j < Math.min(columns, Math.ceil(x.high)); j += 1) {
      if (z[i][j] === null) continue;
      brush.fillStyle = colour(z[i][j]);
      const [left, top] = [Math.round(x.place(j) * sharp), Math.round(y.place(i) * sharp)];
      brush.fillRect(left, top, Math.round(x.place(j + 1) * sharp) - left, Math.round(y.place(i + 1) * sharp) - top);
    }
  }
  plot.hover = (px, py) => text[Math.floor(y.scaleAt(py))]?.[Math.floor(x.scaleAt(px))] || null;
  place(plot, canvas, high);
}

const cut = (values, columns) => Array.from({ length: values.length / columns }, (_, i) => Array.from(values.slice(i * columns, (i + 1) * columns)));

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
function blend(...colours) {
  const stops = colours.map(rgb);
  return (share) => {
    const place = Math.max(0, Math.min(1, share)) * (stops.length - 1);
    const i = Math.min(stops.length - 2, Math.floor(place));
    return `rgb(${stops[i].map((a, k) => Math.round(a + (stops[i + 1][k] - a) * (place - i))).join(",")})`;
  };
}

const pixels = stored("pixels");
if (pixels) {
  const columns = pixels.size[1];
  painters["pixels-mean"] = (plot) => {
    const z = cut(levels(pixels.mean), columns);
    const colour = blend(tint("--card"), tint("--ink"));
    picture(plot, z, z.map((row, i) => row.map((_, j) => `row ${i + 1}, column ${j + 1}`)), (x) => colour(x / 255));
  };
  pixels.runs.forEach((run, index) => {
    painters[`pixels-${index}`] = (plot) => {
      const shares = cut(levels(run.share), columns);
      const largest = Math.max(1, ...shares.flat());
      const text = shares.map((row, i) => row.map((x, j) => `row ${i + 1}, column ${j + 1}\n${x ? `${(x / 2.55).toPrecision(2)} % of its weights are left` : "not read"}`));
      const colour = blend(tint("--low"), tint("--accent"));
      picture(plot, shares.map((row) => row.map((x) => x || null)), text, (x) => colour(x / largest));
    };
  });
}

// Filters side by side, several per row. The channels of one filter stay together.
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
    text[row][column] = `filter ${filter + 1}, channel ${channel + 1}, (${y + 1}, ${x + 1})\n${value === -128 ? "removed" : ((value / 127) * scale).toPrecision(3)}`;
  });
  return [z, text];
}

(stored("gallery") ?? []).forEach((layer, index) => {
  layer.sheets.forEach(({ bits }, run) => {
    painters[`gallery-${index}-${run}`] = (plot) => {
      const [z, text] = sheet(layer, signed(bits));
      const colour = blend(tint("--minus"), tint("--middle"), tint("--plus"));
      picture(plot, z, text, (x) => colour((x + 127) / 254));
    };
  });
});

drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let drawnWidth = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawnWidth) { drawnWidth = innerWidth; drawAll(); } });
document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", drawAll));
