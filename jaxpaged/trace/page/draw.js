// Colours and canvases. Text goes to canvases and text nodes only, never into markup.

const theme = () => {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    text: read("--text"), muted: read("--muted"), line: read("--line"), panel: read("--panel"), empty: read("--empty"),
    cached: read("--cached"), cachedLine: read("--cached-line"), accent: read("--accent"), warn: read("--warn"),
    prefill: read("--prefill"), decode: read("--decode"), dark: read("--is-dark") === "1",
  };
};

// The colour of a request: hues far apart for neighbours, equal lightness (OKLCH to sRGB).
const colourCache = new Map();
function rgbOf(r, dark) {
  const key = r * 2 + dark;
  if (!colourCache.has(key)) {
    const hue = ((r * 137.508 + 255) % 360) * (Math.PI / 180);
    const L = (dark ? 0.72 : 0.7) + [0, 0.07, -0.06][Math.floor(r / 6) % 3], C = 0.135;
    const a = C * Math.cos(hue), b = C * Math.sin(hue);
    const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
    const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
    const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
    const linear = [
      4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
      -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
      -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
    ];
    colourCache.set(key, linear.map((x) => {
      const y = x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055;
      return Math.round(255 * Math.min(1, Math.max(0, y)));
    }));
  }
  return colourCache.get(key);
}
const colourOf = (r, dark, alpha = 1) => `rgba(${rgbOf(r, dark).join(",")},${alpha})`;

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Cantarell, sans-serif';

// A canvas sized in CSS pixels, sharp on any screen.
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  return g;
}

function fit(g, text, width) {
  if (g.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const mid = (low + high + 1) >> 1;
    if (g.measureText(text.slice(0, mid) + "…").width <= width) low = mid;
    else high = mid - 1;
  }
  return low ? text.slice(0, low) + "…" : "";
}

// How a request is called in a picture: by its id where that is short, else by its number.
const labelOf = (request) => (request.id.length <= 6 ? request.id : "#" + request.r);
const sequenceLabel = (state, r, s) => {
  const request = state.requests.get(r);
  const name = request ? labelOf(request) : "#" + r;
  return request && request.n > 1 ? `${name}.${s}` : name;
};

// One block: filled from below by as much as it holds, in the colours of those who refer to it.
function drawBlock(g, x, y, size, { state, block, colours, label = "", dim = false, badge = true }) {
  const owners = state.owners.get(block) || [];
  const gap = size >= 12 ? 2 : size >= 5 ? 1 : 0, c = size - gap;
  g.globalAlpha = dim ? 0.22 : 1;
  if (!owners.length) {
    const cached = state.findable.has(block);
    g.fillStyle = cached ? colours.cached : colours.empty;
    g.fillRect(x, y, c, c);
    if (cached && c >= 8) hatch(g, x, y, c, colours.cachedLine);
  } else {
    const requests = [...new Set(owners.map((o) => o.r))].slice(0, 4);
    const level = c * Math.max(state.filled(block) / state.header.block_size, 0.06);
    requests.forEach((r, i) => {
      const left = x + (c * i) / requests.length, width = c / requests.length;
      g.fillStyle = colourOf(r, colours.dark, 0.3);
      g.fillRect(left, y, width, c);
      g.fillStyle = colourOf(r, colours.dark);
      g.fillRect(left, y + c - level, width, level);
    });
    if (owners.length > 1) drawShared(g, x, y, c, badge ? owners.length : 0, colours);
    if (label && c >= 30 && owners.length === 1) {
      g.fillStyle = colours.dark ? "#0b0d10" : "#101418";
      g.font = `600 ${Math.min(13, c * 0.34)}px ${FONT}`;
      g.textAlign = "center";
      g.textBaseline = "alphabetic";
      g.fillText(fit(g, label, c - 6), x + c / 2, y + c - 6);
    }
  }
  if (c >= 22) {
    g.fillStyle = owners.length ? (colours.dark ? "rgba(11,13,16,.8)" : "rgba(16,20,24,.75)") : colours.muted;
    if (owners.length && state.filled(block) < state.header.block_size * 0.7 && colours.dark) g.fillStyle = colours.text;
    g.font = `${Math.max(7.5, Math.min(10, c * 0.3, (c / String(block).length) * 1.4))}px ${FONT}`;
    g.textAlign = "left";
    g.textBaseline = "top";
    g.fillText(String(block), x + 2, y + 3);
  }
  g.globalAlpha = 1;
}

function drawShared(g, x, y, c, count, colours) {
  g.strokeStyle = colours.text;
  g.lineWidth = c >= 14 ? 2 : 1;
  const inset = g.lineWidth / 2;
  g.strokeRect(x + inset, y + inset, c - 2 * inset, c - 2 * inset);
  if (c < 15 || !count) return;
  const text = "×" + count, size = Math.min(12, c * (c < 32 ? 0.36 : 0.42));
  g.font = `700 ${size}px ${FONT}`;
  const w = Math.min(c, g.measureText(text).width + (c < 32 ? 3 : 6)), h = size + (c < 32 ? 2 : 4);
  g.fillStyle = colours.text;
  g.fillRect(x + c - w, y + c - h, w, h);
  g.fillStyle = colours.panel;
  g.textAlign = "center";
  g.textBaseline = "middle";
  g.fillText(text, x + c - w / 2, y + c - h / 2 + 0.5);
}

function hatch(g, x, y, c, colour) {
  g.save();
  g.beginPath();
  g.rect(x, y, c, c);
  g.clip();
  g.strokeStyle = colour;
  g.lineWidth = 1.2;
  g.beginPath();
  for (let d = -c; d < c; d += 6) {
    g.moveTo(x + d, y + c);
    g.lineTo(x + d + c, y);
  }
  g.stroke();
  g.restore();
}

// The pool: the first `count` blocks in the order of their ids. Returns where each one is.
function drawPool(canvas, width, maxHeight, state, colours, { count, focus, copies }) {
  let size = Math.min(54, Math.max(1, Math.floor(Math.sqrt((width * maxHeight) / count))));
  while (size > 1 && Math.ceil(count / Math.floor(width / size)) * size > maxHeight) size--;
  const perRow = Math.max(1, Math.floor(width / size)), rows = Math.ceil(count / perRow);
  const g = prepare(canvas, width, Math.max(rows * size, size));
  const at = (block) => [((block - 1) % perRow) * size, Math.floor((block - 1) / perRow) * size];
  for (let block = 1; block <= count; block++) {
    const [x, y] = at(block), owners = state.owners.get(block) || [];
    const label = owners.length ? sequenceLabel(state, owners[0].r, owners[0].s) : "";
    drawBlock(g, x, y, size, { state, block, colours, label, dim: focus && !focus.has(block) });
  }
  for (const [source, destination] of copies) drawArrow(g, at(source), at(destination), size, colours.accent);
  return { size, perRow, blockAt: (x, y) => {
    const column = Math.floor(x / size), block = 1 + Math.floor(y / size) * perRow + column;
    return column < perRow && block >= 1 && block <= count ? block : null;
  } };
}

// Bent, so that arrows from one block to several in a row can be told apart.
function drawArrow(g, [x0, y0], [x1, y1], size, colour) {
  const half = size / 2 - 1, ax = x0 + half, ay = y0 + half, bx = x1 + half, by = y1 + half;
  const cx = (ax + bx) / 2 + (by - ay) * 0.22, cy = (ay + by) / 2 - Math.abs(bx - ax) * 0.22;
  const angle = Math.atan2(by - cy, bx - cx), head = Math.max(5, Math.min(10, size / 3));
  g.strokeStyle = g.fillStyle = colour;
  g.lineWidth = 2.2;
  g.beginPath();
  g.moveTo(ax, ay);
  g.quadraticCurveTo(cx, cy, bx - head * 0.8 * Math.cos(angle), by - head * 0.8 * Math.sin(angle));
  g.stroke();
  g.beginPath();
  g.moveTo(bx, by);
  for (const turn of [2.6, -2.6]) g.lineTo(bx + head * Math.cos(angle + turn), by + head * Math.sin(angle + turn));
  g.fill();
}

// How the block tables are laid out in a given width.
function tableLayout(state, width) {
  const left = 124, chip = state.usable < 10000 ? 25 : 31, line = 26, pad = 8, head = 24;
  const perLine = Math.max(1, Math.floor((width - left) / chip));
  return { left, chip, line, pad, head, perLine, heightOf: (row) => Math.ceil(row.blocks.length / perLine) * line + pad };
}

function tablesHeight(state, width) {
  const { head, heightOf } = tableLayout(state, width);
  return Math.max(60, [...state.tables.values()].reduce((sum, row) => sum + heightOf(row), head + 4));
}

// The block tables of the running sequences that are in sight. Returns the boxes of sequences and blocks, for the
// pointer.
function drawTables(canvas, view, state, colours, { focusKey, focusBlock }) {
  const rows = [...state.tables.values()].sort((a, b) => a.r - b.r || a.s - b.s);
  const { left, chip, line, pad, head, perLine, heightOf } = tableLayout(state, view.width);
  const g = prepare(canvas, view.width, view.height);
  const boxes = [];
  let y = head - view.top;
  for (const row of rows) {
    const height = heightOf(row), top = y;
    y += height;
    if (top + height < 0 || top > view.height) continue;
    const key = KEY(row.r, row.s), dim = focusKey ? focusKey !== key : focusBlock && !row.blocks.includes(focusBlock);
    g.globalAlpha = dim ? 0.3 : 1;
    drawTableLabel(g, row, top, height - pad - 4, left, state, colours);
    g.globalAlpha = 1;
    row.blocks.forEach((block, k) => {
      const bx = left + (k % perLine) * chip, by = top + Math.floor(k / perLine) * line;
      const away = dim || (focusBlock && focusBlock !== block && !focusKey);
      drawBlock(g, bx, by, 25, { state, block, colours, badge: false, dim: away });
      boxes.push({ x: bx, y: by, w: chip, h: line, key, block });
    });
    boxes.push({ x: 0, y: top, w: view.width, h: height, key, block: null });
  }
  drawTablesHead(g, left, view.width, colours);
  if (!rows.length) {
    g.fillStyle = colours.muted;
    g.font = `12px ${FONT}`;
    g.textAlign = "left";
    g.fillText("No sequence holds a block.", 10, head + 4);
  }
  return boxes;
}

function drawTableLabel(g, row, y, height, left, state, colours) {
  const key = KEY(row.r, row.s), prefill = state.prefills.get(key), decodes = state.decodes.has(key);
  g.fillStyle = colourOf(row.r, colours.dark);
  g.fillRect(0, y + 1, 4, height);
  g.textBaseline = "top";
  g.textAlign = "left";
  g.fillStyle = colours.text;
  g.font = `600 12px ${FONT}`;
  g.fillText(fit(g, sequenceLabel(state, row.r, row.s), 42), 10, y + 4);
  g.font = `10.5px ${FONT}`;
  g.textAlign = "right";
  g.fillStyle = prefill ? colours.prefill : decodes ? colours.decode : colours.muted;
  g.fillText(prefill ? "+" + prefill : decodes ? "+1" : "·", left - 10, y + 5);
  g.fillStyle = colours.muted;
  g.fillText(String(state.kv.get(key) || 0), 84, y + 5);
}

function drawTablesHead(g, left, width, colours) {
  g.fillStyle = colours.panel;
  g.fillRect(0, 0, width, 19);
  g.fillStyle = colours.muted;
  g.font = `10.5px ${FONT}`;
  g.textBaseline = "top";
  g.textAlign = "left";
  g.fillText("seq.", 10, 2);
  g.fillText("blocks, in order", left, 2);
  g.textAlign = "right";
  g.fillText("tokens", 84, 2);
  g.fillText("step", left - 10, 2);
}
