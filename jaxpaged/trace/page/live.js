// Following a server: records and figures come as server-sent events.

const FIGURES = [
  ["l-in", (f) => perSecond(f.prompt_tokens_per_s), (f) => `tokens/s; ${number.format(f.prompt_tokens_total)} so far`],
  ["l-out", (f) => perSecond(f.output_tokens_per_s), (f) => `tokens/s; ${number.format(f.output_tokens_total)} so far`],
  ["l-ttft", (f) => quantiles(f.ttft_ms), () => "p50 / p95, ms"],
  ["l-itl", (f) => quantiles(f.itl_ms), () => "p50 / p95, ms"],
  ["l-e2e", (f) => quantiles(f.e2e_ms), (f) => `p50 / p95, ms; ${number.format(f.finished_total)} ended so far`],
  ["l-hits", (f) => (f.hit_rate === null ? "–" : percent(f.hit_rate, 1)), () => "of prompt tokens, last minute"],
];
const perSecond = (x) => number.format(Math.round(x));
const quantiles = (q) => (q ? q.map((x) => (x < 100 ? x.toFixed(1) : number.format(Math.round(x)))).join(" / ") : "–");

function follow() {
  document.body.classList.add("live");
  const source = new EventSource(live);
  source.addEventListener("header", (event) => {
    begin(JSON.parse(event.data));
    history_.show(64);
    history_.load([], LIVE_RECORDS);
    $("message").textContent = "Waiting for the engine.";
  });
  source.addEventListener("records", (event) => {
    const records = JSON.parse(event.data);
    if (history_.grow(History.highest(records))) state = null;
    for (const record of records) history_.push(record);
    const gone = history_.trim();
    if (gone) {
      state = null;
      current = following ? -1 : Math.max(0, current - gone);
    }
    $("message").textContent = "";
    $("slider").max = history_.length - 1;
    if (following || current < 0) show(history_.length - 1);
    else if (!state) show(current);
    else timeline.draw($("timeline-box").clientWidth, history_, current, theme());
    document.body.dataset.ready = "1";
  });
  source.addEventListener("figures", (event) => {
    const figures = JSON.parse(event.data);
    for (const [id, value, unit] of FIGURES) tile(id, value(figures), unit(figures));
    $("connection").textContent = figures.skipped ? `live, ${number.format(figures.skipped)} steps not shown` : "live";
  });
  source.onerror = () => {
    $("connection").textContent = source.readyState === EventSource.CLOSED ? "the server has closed this page" : "connecting …";
  };
}
