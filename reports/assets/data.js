"use strict";
// Unfolds the embedded runs (reports/page_pack.py, reports/page_data.py) and answers what is asked of any round:
// its batch, decisions, queues and block owners, exactly as recorded. Draws nothing.
globalThis.benchctl = {};
((B) => {
  const NULL = -1e15; // stands for null in a typed column

  B.inflate = async (text) => {
    const letters = atob(text), bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  };

  const column = (data, at, rows, kind, width) => {
    const out = new Float64Array(rows);
    for (let plane = 0; plane < width; plane++) {
      const from = at + plane * rows, unit = 256 ** plane;
      for (let i = 0; i < rows; i++) out[i] += data[from + i] * unit;
    }
    if (kind === "float") {
      const floats = new Float32Array(Uint32Array.from(out).buffer);
      return Float64Array.from(floats);
    }
    const nullable = kind === "nullable" ? 1 : 0, delta = kind === "delta" ? 1 : 0;
    let last = 0;
    for (let i = 0; i < rows; i++) {
      const c = out[i] - nullable;
      if (c < 0) { out[i] = NULL; continue; }
      const half = Math.floor(c / 2);
      out[i] = (c - 2 * half ? -half - 1 : half) + delta * last;
      last = out[i];
    }
    return out;
  };

  B.unpack = (buffer) => {
    const length = new DataView(buffer).getUint32(0, true), data = new Uint8Array(buffer);
    const header = JSON.parse(new TextDecoder().decode(data.subarray(4, 4 + length)));
    let at = 4 + length;
    const tables = {};
    for (const [table, { rows, columns }] of Object.entries(header.tables)) {
      tables[table] = { rows };
      for (const [name, [kind, width]] of Object.entries(columns)) {
        tables[table][name] = column(data, at, rows, kind, width);
        at += rows * width;
      }
    }
    return [header, tables];
  };

  const orNull = (value) => (value === NULL || value === undefined || Number.isNaN(value) ? null : value);
  B.orNull = orNull;

  // First index with values[index] >= wanted.
  const lower = (values, wanted) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low;
  };
  B.lower = lower;

  const CHECKPOINT = 256; // rounds between two kept states of the queues and of the pool

  class Run {
    constructor(name, place, header, tables) {
      Object.assign(this, { name, place, words: header.words, ids: header.ids, labels: header.labels, facts: header.facts });
      this.tables = tables;
      const { rounds, requests } = tables;
      this.n = rounds.rows;
      this.round = rounds.round;
      // Times in seconds, from the pieces of each round.
      this.start = new Float64Array(this.n);
      this.scheduled = new Float64Array(this.n);
      this.executed = new Float64Array(this.n);
      this.end = new Float64Array(this.n);
      this.begin = new Float64Array(this.n); // of a round's own time: where rounds overlap, the end of the one before
      let now = 0;
      for (let i = 0; i < this.n; i++) {
        this.start[i] = (now += rounds.idle[i]) / 1e6;
        this.scheduled[i] = (now += rounds.scheduling[i]) / 1e6;
        this.executed[i] = (now += rounds.executing[i]) / 1e6;
        this.end[i] = (now += rounds.updating[i]) / 1e6;
        this.begin[i] = i ? Math.max(this.start[i], this.end[i - 1]) : this.start[i];
      }
      // Ordinal of the last round up to i that decodes; -1 before the first.
      this.decoding = new Int32Array(this.n);
      this.decodingRounds = [];
      for (let i = 0; i < this.n; i++) {
        if (rounds.decode_tokens[i] > 0) this.decodingRounds.push(i);
        this.decoding[i] = this.decodingRounds.length - 1;
      }
      this.rowOf = new Map(Array.from(requests.request, (request, row) => [request, row]));
      if (this.facts.batches) this.index();
    }

    index() {
      const { stretches, singles, decisions, evictions, orders } = this.tables;
      this.buckets = Array.from({ length: Math.ceil(this.n / CHECKPOINT) }, () => []);
      this.stretchEnd = new Int32Array(stretches.rows); // last round of each
      this.ofRequest = new Map();
      const entry = (request) => {
        if (!this.ofRequest.has(request)) this.ofRequest.set(request, { stretches: [], singles: [], decisions: [], victims: [] });
        return this.ofRequest.get(request);
      };
      for (let s = 0; s < stretches.rows; s++) {
        const first = stretches.at[s], last = this.decodingRounds[this.decoding[first] + stretches.count[s] - 1];
        this.stretchEnd[s] = last;
        for (let b = Math.floor(first / CHECKPOINT); b <= last / CHECKPOINT; b++) this.buckets[b].push(s);
        entry(stretches.request[s]).stretches.push(s);
      }
      for (let s = 0; s < singles.rows; s++) entry(singles.request[s]).singles.push(s);
      this.admissions = new Map(); // request -> [[round, place among the decisions], …]
      const kinds = this.words.decision;
      for (let d = 0; d < decisions.rows; d++) {
        const request = decisions.request[d], kind = kinds[decisions.kind[d]];
        entry(request).decisions.push(d);
        if (decisions.other[d] !== NULL && decisions.other[d] !== request) entry(decisions.other[d]).victims.push(d);
        if (kind !== "admit" && kind !== "resume") continue;
        if (!this.admissions.has(request)) this.admissions.set(request, []);
        this.admissions.get(request).push([decisions.at[d], d]);
      }
      this.explicit = new Map();
      for (let o = 0; o < orders.rows; o++) {
        if (!this.explicit.has(orders.at[o])) this.explicit.set(orders.at[o], new Map());
        const seats = this.explicit.get(orders.at[o]);
        seats.set(orders.request[o], seats.size);
      }
      this.states = null;
      this.evictionsFrom = evictions.at;
    }

    label(request) { const row = this.rowOf.get(request); return row === undefined ? `#${request}` : this.labels[row]; }
    word(table, column, i) { return this.words[column][this.tables[table][column][i]]; }
    value(column, i) { const values = this.tables.rounds[column]; return values ? orNull(values[i]) : null; }
    has(column) { return column in this.tables.rounds; }
    placeOfRound(number) { return Math.min(lower(this.round, number), this.n - 1); }
    // The round during which a moment lies; the next one where it lies between two.
    placeOfTime(t) { return Math.min(lower(this.end, t), this.n - 1); }

    rowsAt(table, i) {
      const { at } = this.tables[table], out = [];
      for (let row = lower(at, i); row < at.length && at[row] === i; row++) out.push(row);
      return out;
    }

    admittedBefore(request, i) {
      let place = -1;
      for (const [at, d] of this.admissions.get(request) || []) if (at <= i) place = d;
      return place;
    }

    // Rows of `batches`, in batch order.
    batch(i) {
      if (!this.facts.batches) return [];
      const { stretches, singles, rounds } = this.tables, out = [];
      for (const s of this.rowsAt("singles", i)) {
        out.push({
          request: singles.request[s], start: singles.start[s], num_tokens: singles.num_tokens[s], decode: singles.decode[s] === 1,
          cached_tokens: orNull(singles.cached_tokens[s]), yields_token: singles.yields_token[s] === 1, num_blocks: singles.num_blocks[s],
        });
      }
      if (rounds.decode_tokens[i] > 0) {
        for (const s of this.buckets[Math.floor(i / CHECKPOINT)]) {
          if (stretches.at[s] > i || this.stretchEnd[s] < i) continue;
          const start = stretches.start[s] + this.decoding[i] - this.decoding[stretches.at[s]];
          out.push({ request: stretches.request[s], start, num_tokens: 1, decode: true, cached_tokens: null, yields_token: true, num_blocks: null });
        }
      }
      const seats = this.explicit.get(i);
      const key = seats ? (row) => seats.get(row.request) : (row) => this.admittedBefore(row.request, i);
      return out.map((row) => [key(row), row]).sort((a, b) => a[0] - b[0]).map((pair) => pair[1]);
    }

    decision(d) {
      const { decisions } = this.tables;
      return {
        at: decisions.at[d], kind: this.words.decision[decisions.kind[d]], request: decisions.request[d], other: orNull(decisions.other[d]),
        reason: this.words.reason[decisions.reason[d]], needed: orNull(decisions.needed[d]), available: orNull(decisions.available[d]),
        unit: this.words.unit[decisions.unit[d]],
      };
    }
    decisions(i) { return this.facts.batches ? this.rowsAt("decisions", i).map((d) => this.decision(d)) : []; }
    evictions(i) {
      if (!this.facts.batches) return [];
      const { evictions } = this.tables;
      return this.rowsAt("evictions", i).map((row) => ({ request: evictions.request[row], count: evictions.count[row] }));
    }

    // -- the queues before schedule() of round i, in the scheduler's order (reports/queues.py)
    queues(i) {
      if (!this.facts.batches) return { waiting: [], running: [] };
      if (!this.states) this.walkQueues();
      const from = Math.floor(i / CHECKPOINT), state = this.states[from];
      const queues = { waiting: [...state.waiting], running: [...state.running], due: state.due };
      for (let at = from * CHECKPOINT; at <= i; at++) this.stepQueues(queues, at, at < i);
      return { waiting: queues.waiting, running: queues.running };
    }
    walkQueues() {
      this.states = [];
      const queues = { waiting: [], running: [], due: 0 };
      for (let at = 0; at < this.n; at++) {
        if (at % CHECKPOINT === 0) this.states.push({ waiting: [...queues.waiting], running: [...queues.running], due: queues.due });
        this.stepQueues(queues, at, true);
      }
    }
    stepQueues(queues, at, through) {
      const { requests } = this.tables, { priority, scheduler } = this.facts, nano = scheduler === "nano";
      const enter = (request, atHead) => {
        if (priority) {
          const rank = (one) => requests.rank[this.rowOf.get(one)], mine = rank(request);
          let place = queues.waiting.findIndex((one) => rank(one) > mine);
          if (place < 0) place = queues.waiting.length;
          queues.waiting.splice(place, 0, request);
        } else if (atHead) queues.waiting.unshift(request);
        else queues.waiting.push(request);
      };
      const leave = (list, request) => { const place = list.indexOf(request); if (place >= 0) list.splice(place, 1); };
      while (queues.due < requests.rows && (requests.joined[queues.due] === NULL || requests.joined[queues.due] <= at)) {
        if (requests.joined[queues.due] !== NULL) enter(requests.request[queues.due], false);
        queues.due++;
      }
      if (!through) return;
      const gone = [];
      for (const { kind, request } of this.decisions(at)) {
        if (kind === "preempt") { leave(queues.running, request); enter(request, true); }
        else if ((kind === "admit" || kind === "resume") && !nano) { leave(queues.waiting, request); queues.running.push(request); }
        else if (kind === "finish") gone.push(request);
      }
      if (nano) {
        // A partly prefilled request stays at the head of waiting until its last chunk is scheduled.
        for (const row of this.batchSingles(at)) if (row.first) { leave(queues.waiting, row.request); queues.running.push(row.request); }
      }
      for (const request of gone) leave(queues.running, request);
    }
    batchSingles(at) {
      const { singles } = this.tables;
      return this.rowsAt("singles", at)
        .filter((s) => singles.decode[s] === 0 && singles.yields_token[s] === 1)
        .map((s) => ({ request: singles.request[s], first: true }));
    }

    // -- the pool after round i, for small pools: block -> [{request, index}], and which blocks can be found by their hash
    pool(i) {
      if (!this.facts.map) return null;
      const { blocks, hashed } = this.tables;
      if (!this.pools) {
        this.pools = [];
        const owners = new Map();
        let e = 0;
        for (let at = 0; at < this.n; at++) {
          if (at % CHECKPOINT === 0) this.pools.push([new Map(Array.from(owners, ([block, list]) => [block, [...list]])), e]);
          e = this.applyBlocks(owners, e, at);
        }
      }
      const from = Math.floor(i / CHECKPOINT), [kept, first] = this.pools[from];
      const owners = new Map(Array.from(kept, ([block, list]) => [block, [...list]]));
      let e = first;
      for (let at = from * CHECKPOINT; at <= i; at++) e = this.applyBlocks(owners, e, at);
      const { first_block: base, usable_blocks: total } = this.facts;
      const out = [];
      for (let k = 0; k < total; k++) {
        const mask = k < 32 ? hashed.low[i] : hashed.high[i];
        out.push({ block: base + k, owners: owners.get(base + k) || [], cached: Math.floor(mask / 2 ** (k % 32)) % 2 === 1 });
      }
      return out;
    }
    applyBlocks(owners, e, at) {
      const { blocks } = this.tables;
      for (; e < blocks.rows && blocks.at[e] === at; e++) {
        const block = blocks.block[e], event = this.words.event[blocks.event[e]], request = blocks.request[e];
        if (event === "allocate" || event === "share") {
          if (!owners.has(block)) owners.set(block, []);
          owners.get(block).push({ request, index: blocks.index[e] });
        } else if (event === "free" || event === "release") {
          const left = (owners.get(block) || []).filter((owner) => owner.request !== request);
          if (left.length) owners.set(block, left); else owners.delete(block);
        }
      }
      return e;
    }

    // Free blocks before the round and at each turning point in it: [11, 6] or [0, 1, 0].
    freeMoments(i) {
      const { rounds, blocks } = this.tables;
      if (this.tables.moments) {
        const told = this.rowsAt("moments", i);
        if (told.length) return told.map((row) => this.tables.moments.free[row]);
      }
      if (!this.facts.map) return B.turningPoints([rounds.free_blocks_start[i], rounds.free_blocks_scheduled[i], rounds.free_blocks_end[i]]);
      const held = new Map();
      const owned = (block) => {
        if (!held.has(block)) held.set(block, new Set(before.get(block)));
        return held.get(block);
      };
      const before = new Map(i ? this.pool(i - 1).filter((cell) => cell.owners.length).map((cell) => [cell.block, cell.owners.map((o) => o.request)]) : []);
      let free = rounds.free_blocks_start[i];
      const counts = [free];
      for (const e of this.rowsAt("blocks", i)) {
        const event = this.words.event[blocks.event[e]], owners = owned(blocks.block[e]);
        if (event === "allocate" || event === "share") { if (!owners.size) free--; owners.add(blocks.request[e]); }
        else if (event === "free" || event === "release") { owners.delete(blocks.request[e]); if (!owners.size) free++; }
        counts.push(free);
      }
      return B.turningPoints(counts);
    }
  }
  B.Run = Run;

  B.turningPoints = (counts) => {
    const out = [];
    for (const count of counts) {
      const last = out.length - 1;
      if (last >= 0 && count === out[last]) continue;
      if (last > 0 && out[last] > out[last - 1] === count > out[last]) out[last] = count;
      else out.push(count);
    }
    return out;
  };

  B.load = async (element, place) => {
    const [header, tables] = B.unpack(await B.inflate(element.textContent.trim()));
    return new Run(element.dataset.name, place, header, tables);
  };
})(globalThis.benchctl);
