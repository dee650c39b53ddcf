// Everything over time: one column a record, one strip a quantity.

const GUTTER = 142, RIGHT = 14;
const STRIPS = [
  { name: "pool", title: "Blocks", unit: "by id, coloured by request", height: 132 },
  { name: "memory", title: "In use", unit: "blocks", height: 62 },
  { name: "tokens", title: "Tokens", unit: "per step", height: 62 },
  { name: "queue", title: "Requests", unit: "in the engine", height: 62 },
  { name: "events", title: "Events", unit: "", height: 58 },
];
const EVENT_ROWS = [
  ["preempted", "preemptions"],
  ["admitted", "prefix hits"],
  ["copies", "copies"],
];

class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.map = document.createElement("canvas");
    this.mapOf = "";
  }

  get plotWidth() { return this.width - GUTTER - RIGHT; }
  xOf(i, n) { return GUTTER + ((i + 0.5) / n) * this.plotWidth; }
  indexAt(x, n) { return Math.min(n - 1, Math.max(0, Math.floor(((x - GUTTER) / this.plotWidth) * n))); }

  draw(width, history, current, colours) {
    this.width = width;
    const height = STRIPS.reduce((sum, strip) => sum + strip.height + 10, 24);
    const g = prepare(this.canvas, width, height);
    const n = history.length;
    let y = 4;
    for (const strip of STRIPS) {
      this.label(g, strip, y, colours);
      if (n) this[strip.name](g, y, strip.height, history, colours);
      y += strip.height + 10;
    }
    if (!n) return;
    this.axis(g, y, history, colours);
    const x = this.xOf(current, n);
    g.strokeStyle = colours.accent;
    g.lineWidth = 1.5;
    g.beginPath();
    g.moveTo(x, 2);
    g.lineTo(x, y - 4);
    g.stroke();
    g.fillStyle = colours.accent;
    g.beginPath();
    g.moveTo(x - 5, 0);
    g.lineTo(x + 5, 0);
    g.lineTo(x, 7);
    g.fill();
  }

  label(g, strip, y, colours) {
    g.textAlign = "left";
    g.textBaseline = "top";
    g.fillStyle = colours.text;
    g.font = `600 12px ${FONT}`;
    g.fillText(strip.title, 0, y + 2);
    if (strip.name === "pool" || !strip.unit) return;
    g.fillStyle = colours.muted;
    g.font = `10.5px ${FONT}`;
    g.fillText(strip.unit, 0, y + 18);
  }

  scale(g, y, height, top, colours, bottom = "0") {
    g.strokeStyle = colours.line;
    g.lineWidth = 1;
    g.strokeRect(GUTTER + 0.5, y + 0.5, this.plotWidth - 1, height - 1);
    g.fillStyle = colours.muted;
    g.font = `10.5px ${FONT}`;
    g.textAlign = "right";
    g.textBaseline = "top";
    g.fillText(top, GUTTER - 6, y);
    g.textBaseline = "alphabetic";
    g.fillText(bottom, GUTTER - 6, y + height);
  }

  pool(g, y, height, history, colours) {
    const { columns, mapRows } = history;
    const stamp = `${columns.length} ${mapRows} ${history.records[0].step} ${history.length} ${colours.dark}`;
    if (this.mapOf !== stamp) {
      this.mapOf = stamp;
      this.map.width = columns.length;
      this.map.height = mapRows;
      const image = new ImageData(columns.length, mapRows);
      const free = parse(colours.empty), cached = parse(colours.cachedLine);
      columns.forEach((column, x) => {
        for (let row = 0; row < mapRows; row++) {
          const owner = column[row], at = (row * columns.length + x) * 4;
          const rgb = owner >= 0 ? rgbOf(owner, colours.dark) : owner === -2 ? cached : free;
          image.data.set([rgb[0], rgb[1], rgb[2], 255], at);
        }
      });
      this.map.getContext("2d").putImageData(image, 0, 0);
    }
    g.imageSmoothingEnabled = false;
    const width = this.plotWidth * Math.min(1, (columns.length * history.perColumn) / history.length);
    g.drawImage(this.map, GUTTER, y, width, height);
    this.scale(g, y, height, "block 1", colours, number.format(history.shown));
  }

  // Stacked bars; `parts` is [[values of a record -> number, colour], ...].
  bars(g, y, height, history, parts, max) {
    const n = history.length, w = this.plotWidth / n;
    const step = Math.max(1, Math.floor(n / this.plotWidth / 2));
    for (let i = 0; i < n; i += step) {
      let base = y + height;
      for (const [value, colour] of parts) {
        const share = value(history.series[i]) / max;
        if (share <= 0) continue;
        const h = Math.max((height - 1) * share, 1.5);
        g.fillStyle = colour;
        g.fillRect(GUTTER + i * w, base - h, Math.max(w * step + (w > 3 ? -0.6 : 0.4), 0.8), h);
        base -= h;
      }
    }
  }

  memory(g, y, height, history, colours) {
    const total = history.shown;
    this.bars(g, y, height, history, [
      [(s) => s.used - s.shared, colours.decode],
      [(s) => s.shared, colours.text],
      [(s) => s.cachedFree, colours.cachedLine],
    ], total);
    this.scale(g, y, height, number.format(total), colours);
    this.key(g, y + 34, [["shared", colours.text], ["findable, free", colours.cachedLine]], colours);
  }

  tokens(g, y, height, history, colours) {
    const max = Math.max(1, ...blocksOf(history.series, (s) => s.prefill + s.decode));
    this.bars(g, y, height, history, [[(s) => s.decode, colours.decode], [(s) => s.prefill, colours.prefill]], max);
    this.scale(g, y, height, number.format(max), colours);
    this.key(g, y + 34, [["prefill", colours.prefill], ["decode", colours.decode]], colours);
  }

  queue(g, y, height, history, colours) {
    const max = Math.max(1, ...blocksOf(history.series, (s) => s.running + s.waiting + s.swapped));
    this.bars(g, y, height, history, [
      [(s) => s.running, colours.decode],
      [(s) => s.waiting + s.swapped, colours.warn],
    ], max);
    this.scale(g, y, height, number.format(max), colours);
    this.key(g, y + 34, [["running", colours.decode], ["waiting", colours.warn]], colours);
  }

  events(g, y, height, history, colours) {
    const n = history.length, row = height / EVENT_ROWS.length;
    const marks = [colours.warn, colours.cachedLine, colours.accent];
    EVENT_ROWS.forEach(([, title], k) => {
      const middle = y + row * (k + 0.5);
      g.strokeStyle = colours.line;
      g.beginPath();
      g.moveTo(GUTTER, middle);
      g.lineTo(GUTTER + this.plotWidth, middle);
      g.stroke();
      g.fillStyle = colours.muted;
      g.font = `10.5px ${FONT}`;
      g.textAlign = "right";
      g.textBaseline = "middle";
      g.fillText(title, GUTTER - 6, middle);
    });
    history.records.forEach((record, i) => {
      const x = this.xOf(i, n);
      const has = [
        (record.preempted || []).length > 0,
        (record.admitted || []).some(([, hits]) => hits > 0),
        (record.copies || []).length > 0,
      ];
      has.forEach((yes, k) => {
        if (!yes) return;
        const middle = y + row * (k + 0.5);
        g.fillStyle = marks[k];
        g.beginPath();
        if (k === 0) {
          g.moveTo(x - 5, middle - 5);
          g.lineTo(x + 5, middle - 5);
          g.lineTo(x, middle + 5);
        } else if (k === 1) g.arc(x, middle, 4, 0, 7);
        else g.rect(x - 3.5, middle - 3.5, 7, 7);
        g.fill();
      });
    });
  }

  axis(g, y, history, colours) {
    const n = history.length, ticks = Math.min(n, 9);
    g.fillStyle = colours.muted;
    g.font = `10.5px ${FONT}`;
    g.textBaseline = "top";
    let last = -1e9;
    for (let k = 0; k < ticks; k++) {
      const i = ticks === 1 ? 0 : Math.round((k * (n - 1)) / (ticks - 1)), x = this.xOf(i, n);
      if (x - last < 60) continue;
      last = x;
      g.textAlign = k === 0 ? "left" : k === ticks - 1 ? "right" : "center";
      g.fillText(String(history.records[i].step), x, y);
    }
    g.textAlign = "left";
    g.fillText("Step", 0, y);
  }

  key(g, y, entries, colours) {
    g.font = `10.5px ${FONT}`;
    g.textAlign = "left";
    g.textBaseline = "middle";
    entries.forEach(([text, colour], k) => {
      g.fillStyle = colour;
      g.fillRect(0, y + k * 14, 8, 8);
      g.fillStyle = colours.muted;
      g.fillText(text, 13, y + k * 14 + 4.5);
    });
  }
}

// The largest value, in a list of one: spreading a long list would overflow the stack.
function blocksOf(series, value) {
  let most = 0;
  for (const s of series) most = Math.max(most, value(s));
  return [most];
}

function parse(colour) {
  const hex = colour.replace("#", "");
  return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
}
