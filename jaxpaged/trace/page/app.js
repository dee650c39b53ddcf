// The page: loads or follows a trace, and shows one moment of it.

const $ = (id) => document.getElementById(id);
const live = document.body.dataset.live;
const number = new Intl.NumberFormat("en-US");

let history_ = null, state = null, current = -1, following = Boolean(live), timer = null, hover = null, marks = {};
const timeline = new Timeline($("timeline"));

function show(i) {
  if (!history_ || !history_.length) return;
  i = Math.min(history_.length - 1, Math.max(0, i));
  state = history_.seek(i, state, current);
  current = i;
  $("slider").max = history_.length - 1;
  $("slider").value = i;
  draw();
}

function tile(id, value, unit = "") {
  $(id).textContent = value;
  if ($(id + "-unit")) $(id + "-unit").textContent = unit;
}

function drawTiles() {
  const s = state.summary(), total = state.usable, size = history_.header.block_size;
  tile("t-step", number.format(state.record.step), state.record.idle ? "idle" : timeText(state.record.t));
  tile("t-used", number.format(s.used), `of ${number.format(total)} (${percent(s.used, total)})`);
  tile("t-fill", s.used ? percent(state.tokens, s.used * size) : "–", "of the slots in use");
  tile("t-shared", number.format(s.shared), s.entries ? `blocks; ${percent(s.entries - s.used, s.entries)} saved` : "blocks");
  tile("t-tokens", number.format(s.prefill + s.decode), `${number.format(s.prefill)} prefill + ${number.format(s.decode)} decode`);
  tile("t-queue", `${s.running} / ${s.waiting + s.swapped}`, s.swapped ? `running / waiting (${s.swapped} swapped)` : "running / waiting");
  tile("t-preempt", number.format(state.totals.preemptions), "so far");
  tile("t-hits", state.totals.looked ? percent(state.totals.hits, state.totals.looked) : "–", "of looked-up tokens");
}

const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part === whole || !part ? 0 : 1)} %` : "–");
function timeText(t) {
  if (history_.header.unit === "step") return "no clock";
  return t < 1 ? `${(t * 1000).toFixed(1)} ms` : t < 120 ? `${t.toFixed(2)} s` : `${(t / 60).toFixed(1)} min`;
}

function draw() {
  if (!state) return;
  const colours = theme();
  let focus = null, focusKey = null, focusBlock = null;
  if (hover) {
    focusKey = hover.key;
    focusBlock = hover.block;
    const keys = hover.key ? [hover.key] : (state.owners.get(hover.block) || []).map((o) => KEY(o.r, o.s));
    const tables = keys.map((key) => state.tables.get(key)).filter(Boolean);
    if (tables.length) focus = new Set(tables.flatMap((t) => t.blocks));
  }
  drawTiles();
  marks.pool = drawPool($("pool"), $("pool-box").clientWidth, 372, state, colours, {
    count: history_.shown, focus, copies: state.record.copies || [],
  });
  drawTableBox(colours, { focusKey, focusBlock });
  const hidden = state.usable - history_.shown;
  $("pool-note").textContent = hidden ? `each square is a block; ${number.format(hidden)} more are not used here` : "each square is a block";
  drawQueue(colours);
  drawEvents();
  timeline.draw($("timeline-box").clientWidth, history_, current, colours);
}

// Only what is in sight: a batch may have hundreds of tables.
function drawTableBox(colours, focus) {
  const box = $("tables-box");
  const height = tablesHeight(state, box.clientWidth - 10);
  box.style.height = Math.min(388, height) + "px";
  $("tables-space").style.height = height + "px";
  const view = { width: box.clientWidth - 10, height: box.clientHeight, top: box.scrollTop };
  marks.tables = drawTables($("tables"), view, state, colours, focus);
}

function line(parent, text, colour, title) {
  const item = document.createElement("li");
  if (colour) {
    const dot = document.createElement("span");
    dot.className = "dot";
    dot.style.background = colour;
    item.append(dot);
  }
  item.append(text);
  if (title) item.title = title;
  parent.append(item);
}

function drawQueue(colours) {
  const list = $("queue"), queue = state.queue;
  list.replaceChildren();
  for (const q of queue.slice(0, 40)) {
    const where = q.status === "swapped" ? ", on the host" : "";
    line(list, `${labelOf(q)}  ${q.prompt} prompt tokens${where}`, colourOf(q.r, colours.dark), q.id);
  }
  if (queue.length > 40) line(list, `and ${number.format(queue.length - 40)} more`);
  $("queue-count").textContent = queue.length ? number.format(queue.length) : "";
  if (!queue.length) line(list, "empty");
}

function drawEvents() {
  const list = $("events"), record = state.record, colours = theme();
  list.replaceChildren();
  const name = (r) => (history_.names.has(r) ? labelOf(history_.names.get(r)) : "#" + r);
  const say = (text, r) => list.childElementCount < 60 && line(list, text, r === undefined ? null : colourOf(r, colours.dark));
  if (record.reset) return say("the trace begins here, with what there was");
  for (const [r, s, reason] of record.finished || []) say(`${name(r)}${s ? "." + s : ""} finished: ${reason}`, r);
  for (const [r, way] of record.preempted || []) say(`${name(r)} preempted: ${PREEMPTED[way]}`, r);
  for (const [r, , prompt] of record.new || []) say(`${name(r)} arrived, ${prompt} prompt tokens`, r);
  for (const [r, hits, tokens] of record.admitted || []) {
    say(`${name(r)} admitted${hits ? `: ${hits} of ${tokens} tokens found` : ""}`, r);
  }
  for (const [from, to] of record.copies || []) say(`copy on write: block ${from} → ${to}`);
  if ((record.swapped_out || []).length) say(`${record.swapped_out.length} blocks to the host`);
  if ((record.swapped_in || []).length) say(`${record.swapped_in.length} blocks back from the host`);
  if (record.idle) say("nothing is left to do");
  if (!list.childElementCount) say("no event in this step");
}
const PREEMPTED = { recompute: "its blocks are freed", swap: "its blocks go to the host", reset: "its KV was lost" };

function step(by) {
  following = false;
  stop();
  show(current + by);
}
function stop() {
  clearInterval(timer);
  timer = null;
  $("play").textContent = "▶";
}
function play() {
  if (timer) return stop();
  if (current >= history_.length - 1) show(0);
  $("play").textContent = "❚❚";
  timer = setInterval(() => {
    if (current >= history_.length - 1) return stop();
    show(current + 1);
  }, 1000 / Number($("speed").value));
}

function tooltip(event, lines) {
  const tip = $("tip");
  tip.hidden = !lines;
  if (!lines) return;
  tip.replaceChildren(...lines.map((text) => Object.assign(document.createElement("div"), { textContent: text })));
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

function describeBlock(block) {
  const owners = state.owners.get(block) || [], size = history_.header.block_size;
  const lines = [`Block ${block}`];
  if (owners.length) lines.push(`${state.filled(block)} of ${size} tokens`, owners.length > 1 ? `${owners.length} references` : "1 reference");
  for (const { r, s, index } of owners.slice(0, 8)) {
    const request = state.requests.get(r);
    const id = request && labelOf(request) !== request.id ? ` (${request.id.slice(0, 60)})` : "";
    lines.push(`${sequenceLabel(state, r, s)}${id}: tokens ${index * size} to ${(index + 1) * size - 1}`);
  }
  if (owners.length > 8) lines.push(`and ${owners.length - 8} more`);
  lines.push(state.findable.has(block) ? "can be found by prefix" : owners.length ? "cannot be found by prefix yet" : "free");
  return lines;
}

function describeSequence(key) {
  const table = state.tables.get(key), request = table && state.requests.get(table.r);
  if (!request) return null;
  return [
    `${sequenceLabel(state, table.r, table.s)}: ${request.id.slice(0, 80)}`,
    `${state.kv.get(key) || 0} tokens in ${table.blocks.length} blocks`,
    `prompt ${request.prompt}, at most ${request.max} more`,
    "table: " + table.blocks.slice(0, 24).join(" ") + (table.blocks.length > 24 ? " …" : ""),
  ];
}

function setHover(next) {
  if (JSON.stringify(next) === JSON.stringify(hover)) return;
  hover = next;
  draw();
}

function listen() {
  $("pool").addEventListener("mousemove", (event) => {
    const block = marks.pool && marks.pool.blockAt(event.offsetX, event.offsetY);
    setHover(block ? { block, key: null } : null);
    tooltip(event, block ? describeBlock(block) : null);
  });
  $("tables").addEventListener("mousemove", (event) => {
    const inside = (b) => event.offsetX >= b.x && event.offsetX < b.x + b.w && event.offsetY >= b.y && event.offsetY < b.y + b.h;
    const box = (marks.tables || []).find(inside);
    setHover(box ? { block: box.block, key: box.block ? null : box.key } : null);
    tooltip(event, box ? (box.block ? describeBlock(box.block) : describeSequence(box.key)) : null);
  });
  for (const id of ["pool", "tables"]) {
    $(id).addEventListener("mouseleave", () => { setHover(null); tooltip(null, null); });
  }
  $("tables-box").addEventListener("scroll", () => { if (state) drawTableBox(theme(), {}); });
  const scrub = (event) => { following = false; stop(); show(timeline.indexAt(event.offsetX, history_.length)); };
  $("timeline").addEventListener("mousedown", scrub);
  $("timeline").addEventListener("mousemove", (event) => { if (event.buttons === 1) scrub(event); });
  $("slider").addEventListener("input", () => { following = false; stop(); show(Number($("slider").value)); });
  $("play").addEventListener("click", play);
  $("back").addEventListener("click", () => step(-1));
  $("forward").addEventListener("click", () => step(1));
  $("newest").addEventListener("click", () => { following = true; show(history_.length - 1); });
  $("speed").addEventListener("change", () => { if (timer) { stop(); play(); } });
  $("theme").addEventListener("click", () => {
    const dark = theme().dark;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    draw();
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      ArrowLeft: () => step(event.shiftKey ? -10 : -1), ArrowRight: () => step(event.shiftKey ? 10 : 1),
      Home: () => step(-Infinity), End: () => step(Infinity), " ": play,
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

function begin(header) {
  history_ = new History(header);
  state = null;
  current = -1;
  $("model").textContent = header.model || "a scheduler";
  $("shape").textContent =
    `${number.format(header.num_blocks - 1)} blocks of ${header.block_size} tokens` +
    (header.num_host_blocks ? `, ${number.format(header.num_host_blocks)} on the host` : "") +
    (header.prefix_caching ? "" : ", no prefix cache");
}

async function loadEmbedded() {
  const packed = Uint8Array.from(atob($("trace-data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const lines = (await new Response(stream).text()).trimEnd().split("\n");
  begin(JSON.parse(lines[0]));
  const records = lines.slice(1).map((text) => JSON.parse(text));
  history_.show(Math.max(24, Math.ceil(History.highest(records) * 1.1)));
  history_.load(records, records.length);
  const wanted = Number(new URLSearchParams(location.hash.slice(1)).get("record"));
  if (history_.length) show(Number.isInteger(wanted) ? wanted : 0);
  else $("message").textContent = "This trace has no steps.";
}

listen();
if (live) follow();
else loadEmbedded().then(() => { document.body.dataset.ready = "1"; }, (error) => { $("message").textContent = `This page cannot show its trace: ${error.message}`; });
