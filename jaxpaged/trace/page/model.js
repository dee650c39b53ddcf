// The state that a trace leads to, step by step; the same rules as `Replay` in Python.
"use strict";

const KEY = (r, s) => r + "/" + s;
// Copies of the state to seek from: fewer of a large pool, so that together they stay small.
const KEYFRAMES = 160, MIN_KEYFRAMES = 12, KEYFRAME_BLOCKS = 1e6;
const MAX_COLUMNS = 1200;
const MAX_MAP_ROWS = 240;
// Of a live page: how many steps it can look back.
const LIVE_RECORDS = 1200;

class State {
  constructor(header) {
    this.header = header;
    this.totals = { looked: 0, hits: 0, preemptions: 0, copies: 0, finished: 0, swapped: 0 };
    this.record = null;
    this.forget();
  }

  forget() {
    this.requests = new Map(); // number -> {id, prompt, max, n, priority, arrived, status, open}
    this.tables = new Map(); // key -> {r, s, blocks}
    this.host = new Map();
    this.kv = new Map(); // key -> tokens in the pool
    this.decodes = new Map();
    this.owners = new Map(); // block -> [{r, s, index}]
    this.findable = new Set();
    this.prefills = new Map();
    this.prefillTokens = 0;
    this.entries = 0; // of all tables
    this.shared = 0; // blocks with more than one owner
    this.cachedFree = 0; // findable blocks without an owner
  }

  // Tables and lists of owners are replaced, never changed, so the copy may refer to the same ones.
  clone() {
    const copy = Object.assign(new State(this.header), this);
    copy.totals = { ...this.totals };
    copy.requests = new Map();
    for (const [r, request] of this.requests) copy.requests.set(r, { ...request });
    for (const name of ["tables", "host", "kv", "decodes", "owners"]) copy[name] = new Map(this[name]);
    copy.findable = new Set(this.findable);
    return copy;
  }

  apply(record) {
    if (record.reset) this.forget();
    this.record = record;
    for (const [r, id, prompt, max, n, priority, arrived] of record.new || []) {
      this.requests.set(r, { r, id, prompt, max, n, priority, arrived, status: "waiting", open: n });
    }
    for (const r of record.running || []) this.requests.get(r).status = "running";
    for (const [r, hits, tokens] of record.admitted || []) {
      this.requests.get(r).status = "running";
      this.totals.hits += hits;
      this.totals.looked += tokens;
    }
    for (const [r, way] of record.preempted || []) {
      this.requests.get(r).status = way === "swap" ? "swapped" : "waiting";
      if (way !== "reset") this.totals.preemptions++;
    }
    this.totals.copies += (record.copies || []).length;
    this.totals.swapped += (record.swapped_out || []).length + (record.swapped_in || []).length;
    for (const [r, s, keep, blocks] of record.tables || []) this.changeTable(r, s, keep, blocks);
    for (const [r, s, keep, blocks] of record.host_tables || []) {
      const before = this.host.get(KEY(r, s));
      const table = (before ? before.blocks.slice(0, keep) : []).concat(blocks);
      if (table.length) this.host.set(KEY(r, s), { r, s, blocks: table });
      else this.host.delete(KEY(r, s));
    }
    if (record.tables || record.host_tables) {
      for (const key of [...this.kv.keys()]) if (!this.tables.has(key) && !this.host.has(key)) this.kv.delete(key);
    }
    for (const block of record.uncached || []) {
      this.findable.delete(block);
      this.cachedFree -= !this.owners.has(block);
    }
    for (const block of record.cached || []) {
      this.findable.add(block);
      this.cachedFree += !this.owners.has(block);
    }
    this.applyWork(record);
    for (const [r] of record.finished || []) {
      const request = this.requests.get(r);
      if (--request.open === 0) {
        this.requests.delete(r);
        this.totals.finished++;
      }
    }
  }

  changeTable(r, s, keep, blocks) {
    const key = KEY(r, s);
    const before = this.tables.has(key) ? this.tables.get(key).blocks : [];
    for (const block of before.slice(keep)) {
      const left = this.owners.get(block).filter((o) => o.r !== r || o.s !== s);
      this.shared -= left.length === 1;
      if (left.length) this.owners.set(block, left);
      else {
        this.owners.delete(block);
        this.cachedFree += this.findable.has(block);
      }
    }
    blocks.forEach((block, i) => {
      const owners = this.owners.get(block) || [];
      this.shared += owners.length === 1;
      this.cachedFree -= !owners.length && this.findable.has(block);
      this.owners.set(block, [...owners, { r, s, index: keep + i }]);
    });
    this.entries += blocks.length - Math.max(0, before.length - keep);
    const after = before.slice(0, keep).concat(blocks);
    if (after.length) this.tables.set(key, { r, s, blocks: after });
    else this.tables.delete(key);
  }

  applyWork(record) {
    for (const [r, s] of record.decodes_ended || []) this.decodes.delete(KEY(r, s));
    for (const [key, length] of this.decodes) this.decodes.set(key, length + 1);
    for (const [r, s, length] of record.decodes || []) this.decodes.set(KEY(r, s), length);
    this.prefills = new Map();
    this.prefillTokens = 0;
    for (const [r, s, tokens, length] of record.prefills || []) {
      this.prefills.set(KEY(r, s), tokens);
      this.prefillTokens += tokens;
      this.kv.set(KEY(r, s), length);
    }
    for (const [key, length] of this.decodes) this.kv.set(key, length);
  }

  get usable() { return this.header.num_blocks - 1; }
  get used() { return this.owners.size; }

  // Tokens that a block holds, as the longest of those who refer to it has it.
  filled(block) {
    let most = 0;
    for (const { r, s, index } of this.owners.get(block) || []) {
      most = Math.max(most, (this.kv.get(KEY(r, s)) || 0) - index * this.header.block_size);
    }
    return Math.min(most, this.header.block_size);
  }

  // Tokens in all blocks, those of shared blocks once.
  get tokens() {
    let tokens = 0;
    for (const block of this.owners.keys()) tokens += this.filled(block);
    return tokens;
  }

  count(status) {
    let count = 0;
    for (const request of this.requests.values()) count += request.status === status;
    return count;
  }

  get queue() {
    return [...this.requests.values()]
      .filter((q) => q.status !== "running")
      .sort((a, b) => a.priority - b.priority || a.arrived - b.arrived || a.r - b.r);
  }

  summary() {
    return {
      used: this.used, shared: this.shared, entries: this.entries, cachedFree: this.cachedFree,
      running: this.count("running"), waiting: this.count("waiting"), swapped: this.count("swapped"),
      prefill: this.prefillTokens, decode: this.decodes.size,
    };
  }
}

// All records, a summary of each, and copies of the state to seek from.
class History {
  constructor(header) {
    this.header = header;
    this.base = new State(header);
    this.show(header.num_blocks - 1);
    this.clear();
  }

  // Of a pool that is much larger than what is ever used of it, only the first blocks are drawn.
  show(blocks) {
    this.shown = Math.min(blocks, this.header.num_blocks - 1);
    this.mapRows = Math.min(this.shown, MAX_MAP_ROWS);
  }

  // The highest block that any of these records names; blocks are handed out from the lowest on.
  static highest(records) {
    let most = 0;
    for (const record of records) {
      for (const [, , , blocks] of record.tables || []) for (const block of blocks) most = Math.max(most, block);
      for (const block of record.cached || []) most = Math.max(most, block);
    }
    return most;
  }

  // Of a live page: draw more blocks from now on, if there is need. True: all columns are new.
  grow(highest) {
    if (highest <= this.shown) return false;
    this.show(Math.ceil(1.5 * highest));
    const records = this.records;
    this.clear();
    this.load(records, LIVE_RECORDS);
    return true;
  }

  clear() {
    this.records = [];
    this.series = [];
    this.columns = []; // Int32Array [mapRows]: owner of sampled blocks; -1 free, -2 free and findable
    this.keyframes = [];
    this.head = this.base.clone();
    this.names = new Map(); // number -> {r, id} of all requests, the finished ones too
    for (const { r, id } of this.base.requests.values()) this.names.set(r, { r, id });
  }

  get length() { return this.records.length; }

  // `expected`: how many records there will be, which fixes how many share one column of the map.
  load(records, expected) {
    this.perColumn = Math.max(1, Math.ceil(expected / MAX_COLUMNS));
    const keyframes = Math.min(KEYFRAMES, Math.max(MIN_KEYFRAMES, KEYFRAME_BLOCKS / this.header.num_blocks));
    this.perKeyframe = Math.max(16, Math.ceil(expected / keyframes));
    for (const record of records) this.push(record);
  }

  push(record) {
    const i = this.records.length;
    if (i % this.perKeyframe === 0) this.keyframes.push(this.head.clone());
    for (const [r, id] of record.new || []) this.names.set(r, { r, id });
    this.head.apply(record);
    this.records.push(record);
    this.series.push(this.head.summary());
    if ((i + 1) % this.perColumn === 0 || i % this.perColumn === 0) {
      this.columns[Math.floor(i / this.perColumn)] = this.column(this.head);
    }
  }

  // Of a live page: forget the oldest half once there are too many.
  trim() {
    if (this.records.length <= LIVE_RECORDS) return 0;
    const gone = this.records.length - LIVE_RECORDS / 2;
    for (const record of this.records.slice(0, gone)) this.base.apply(record);
    const rest = this.records.slice(gone);
    this.clear();
    this.load(rest, LIVE_RECORDS);
    return gone;
  }

  column(state) {
    const column = new Int32Array(this.mapRows), blocks = this.shown;
    for (let row = 0; row < this.mapRows; row++) {
      const block = 1 + Math.floor((row * blocks) / this.mapRows);
      const owners = state.owners.get(block);
      column[row] = owners ? owners[0].r : state.findable.has(block) ? -2 : -1;
    }
    return column;
  }

  // The state after record `i`; `near` is one that may be moved there.
  seek(i, near, nearIndex) {
    const frame = Math.floor(i / this.perKeyframe);
    let state = near, from = nearIndex + 1;
    if (!near || nearIndex > i || from < frame * this.perKeyframe) {
      state = this.keyframes[frame].clone();
      from = frame * this.perKeyframe;
    }
    for (let k = from; k <= i; k++) state.apply(this.records[k]);
    return state;
  }
}
