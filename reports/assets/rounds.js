"use strict";
// The lanes of a run over the shared axis: what each round fed, the pool, the queues, where the time went, and why it stopped.
// Where several rounds fall on the same pixels, those with the least and the most are drawn side by side, as recorded.
((B) => {
  const view = B.view;
  const PAIR = 2; // pixels that share a least and a most

  // Rounds to draw as bars: [{i, x, width}], and how many rounds stand behind a pair of bars at most (1: every round is drawn).
  B.bars = (plane, run, total) => {
    const first = B.indexAt(run, view.lo), last = B.indexAt(run, view.hi), out = [];
    if (!run.n) return [out, 1];
    let most = 1, i = Math.max(first - 1, 0);
    const end = Math.min(last + 1, run.n - 1);
    while (i <= end) {
      const x = plane.x(B.left(run, i)), right = plane.x(B.right(run, i));
      const slot = Math.floor(x / PAIR), edge = (slot + 1) * PAIR;
      if (right >= edge) { out.push({ i, x, width: Math.max(right - x, 1) }); i++; continue; }
      let least = i, greatest = i, count = 0;
      for (; i <= end && plane.x(B.right(run, i)) < edge; i++, count++) {
        if (total(i) < total(least)) least = i;
        if (total(i) > total(greatest)) greatest = i;
      }
      most = Math.max(most, count);
      const pair = least === greatest ? [least] : least < greatest ? [least, greatest] : [greatest, least];
      pair.forEach((one, k) => out.push({ i: one, x: slot * PAIR + (k * PAIR) / pair.length, width: PAIR / pair.length }));
    }
    return [out, most];
  };

  const stack = (plane, run, parts, { most = null, mark = null, lasting = false, least = 0 } = {}) => {
    const total = (i) => parts.reduce((sum, part) => sum + part.of(i), 0);
    const [bars, behind] = B.bars(plane, run, total);
    // A state lasts until the next round has changed it, so over idle time too.
    if (lasting) bars.forEach((bar, k) => { bar.width = Math.max(bar.width, (k + 1 < bars.length ? bars[k + 1].x : bar.x + bar.width) - bar.x); });
    let top = most;
    if (top === null) top = bars.reduce((high, bar) => Math.max(high, total(bar.i)), 0) * 1.05 || 1;
    if (mark !== null && mark <= top * 1.5) top = Math.max(top, mark * 1.05);
    const y = plane.scale(top, 3), g = plane.g;
    for (const part of parts) {
      g.fillStyle = B.colour(part.colour);
      for (const bar of bars) {
        const value = part.of(bar.i);
        if (!value) continue;
        let below = 0;
        for (const other of parts) { if (other === part) break; below += other.of(bar.i); }
        const height = Math.max(y(below) - y(below + value), least);
        const x = plane.snap(bar.x);
        g.fillRect(x, y(below) - height, Math.max(plane.snap(bar.x + bar.width) - x, plane.least), height);
      }
    }
    if (mark !== null && mark <= top) {
      g.strokeStyle = B.colour("text");
      g.setLineDash([5, 4]);
      g.beginPath();
      g.moveTo(B.MARGIN.left, y(mark));
      g.lineTo(B.MARGIN.left + plane.width, y(mark));
      g.stroke();
      g.setLineDash([]);
    }
    return behind;
  };

  // Step lines: for each pixel column the span from least to most.
  const lines = (plane, run, series) => {
    const first = Math.max(B.indexAt(run, view.lo) - 1, 0), last = Math.min(B.indexAt(run, view.hi) + 1, run.n - 1);
    let top = 1;
    for (const one of series) for (let i = first; i <= last; i++) top = Math.max(top, one.of(i));
    const y = plane.scale(top * 1.08, 3), g = plane.g;
    for (const one of series) {
      g.strokeStyle = B.colour(one.colour);
      g.lineWidth = 1.5;
      g.setLineDash(one.dash || []);
      g.beginPath();
      let i = first, pen = false;
      while (i <= last) {
        const begin = view.axis === "time" ? plane.x(run.end[i]) : plane.x(B.left(run, i)), column = Math.floor(begin);
        let low = one.of(i), high = low, final = low, next = i;
        for (; next <= last; next++) {
          const x = view.axis === "time" ? plane.x(run.end[next]) : plane.x(B.left(run, next));
          if (next > i && Math.floor(x) !== column) break;
          final = one.of(next);
          low = Math.min(low, final);
          high = Math.max(high, final);
        }
        const until = next <= last ? (view.axis === "time" ? plane.x(run.end[next]) : plane.x(B.left(run, next))) : plane.x(B.right(run, Math.min(next, run.n) - 1));
        if (!pen) g.moveTo(begin, y(one.of(i)));
        else g.lineTo(begin, y(one.of(i)));
        if (high > low) { g.lineTo(begin, y(high)); g.lineTo(begin, y(low)); g.lineTo(begin, y(final)); }
        g.lineTo(until, y(final));
        pen = true;
        i = next;
      }
      g.stroke();
    }
    g.setLineDash([]);
    g.lineWidth = 1;
  };

  // A strip whose columns are split by how often each word occurs among their rounds.
  const strip = (plane, run, column, tint) => {
    const codes = run.tables.rounds[column], words = run.words[column], g = plane.g, height = plane.bottom - plane.top;
    const first = Math.max(B.indexAt(run, view.lo) - 1, 0), last = Math.min(B.indexAt(run, view.hi) + 1, run.n - 1);
    let i = first;
    while (i <= last && run.n) {
      const x = plane.x(B.left(run, i)), right = plane.x(B.right(run, i)), edge = Math.floor(x) + 1;
      const counts = new Map([[codes[i], 1]]);
      let until = right, next = i + 1;
      for (; right < edge && next <= last && plane.x(B.right(run, next)) < edge; next++) {
        counts.set(codes[next], (counts.get(codes[next]) || 0) + 1);
        until = plane.x(B.right(run, next));
      }
      const from = next > i + 1 ? edge - 1 : x, width = next > i + 1 ? 1 : Math.max(until - x, 0.7), all = next - i;
      let y = plane.top;
      for (const code of [...counts.keys()].sort((a, b) => a - b)) {
        const part = (counts.get(code) / all) * height, colour = tint(words[code]);
        if (colour) { g.fillStyle = B.colour(colour); g.fillRect(plane.snap(from), y, Math.max(plane.snap(from + width) - plane.snap(from), plane.least), part); }
        y += part;
      }
      i = next;
    }
  };

  const KINDS = { prefill: "c-prefill", decode: "c-decode", mixed: "c-mixed", empty: "c-free" };
  const STOPS = {
    waiting_empty: "s-none", running_empty: "s-none", token_budget: "s-budget", not_first: "s-notfirst", chunking_disabled: "s-notfirst", max_num_seqs: "s-seats",
    blocks: "s-blocks", reserve_full_isl: "s-reserve", watermark: "s-reserve", preemption: "s-preempt", self_preempted: "s-preempt",
  };
  B.stopColour = (word) => (word === null ? null : STOPS[word] || "s-other");
  B.kindColour = (word) => KINDS[word] || "c-free";

  const lanesOf = (run) => {
    const of = (column) => { const values = run.tables.rounds[column]; return (i) => Math.max(values[i], 0); };
    const free = of("free_blocks_end"), cachedFree = of("cached_free_blocks"), total = run.facts.usable_blocks || 0, budget = run.facts.budget;
    const present = (column) => run.n && run.tables.rounds[column].some((value) => value > 0);
    const wordsOf = (column) => {
      const counts = new Map();
      for (const code of run.tables.rounds[column]) counts.set(code, (counts.get(code) || 0) + 1);
      return [...counts].sort((a, b) => b[1] - a[1]).map(([code]) => run.words[column][code]);
    };
    const NOT_SAID = new Set([null, "null", "simulated"]); // the modes of engines without a device, and loops that never ran
    // A strip for what differs from round to round; what is the same in all is a line of text.
    const stripOrLine = (title, column, tint) => {
      const words = wordsOf(column);
      if (words.length > 1) lanes.push({ title, height: 20, keys: words.map((word) => ({ name: word === null ? "did not run" : word, colour: word === null ? "bg" : tint(word) })), draw: (plane) => { strip(plane, run, column, tint); return 1; } });
      else if (words.length && !NOT_SAID.has(words[0])) same.push([title, words[0]]);
    };
    const batch = [{ name: "decode", colour: "c-decode", of: of("decode_tokens") }, { name: "prefill", colour: "c-prefill", of: of("prefill_tokens") }];
    const cached = [{ name: "cached (not computed)", colour: "c-cached", of: of("cached_tokens") }];
    const pool = [{ name: "used", colour: "c-used", of: (i) => total - free(i) }, { name: "free, reusable", colour: "c-cached-free", of: cachedFree }, { name: "free", colour: "c-free", of: (i) => free(i) - cachedFree(i) }];
    // Of a pool that is never half full the lower part is drawn.
    const held = run.tables.rounds.free_blocks_end.reduce((most, value, i) => Math.max(most, total - value + Math.max(cachedFree(i), 0)), 0);
    const height = held < total / 2 ? Math.max(held * 1.1, 1) : total || 1;
    const queues = [{ name: "running", colour: "c-decode", of: of("running") }, { name: "waiting", colour: "c-waiting", of: of("waiting") }];
    if (present("skipped")) queues.push({ name: "skipped", colour: "c-stalled", dash: [4, 3], of: of("skipped") });
    // Times of one clock: what was measured on the host and the device, or, without a device, what the engine's formula gave.
    const ticks = run.facts.clock === "rounds"; // there a round has no duration but its tick
    const measured = run.has("device_s"), host = (column) => (i) => { const value = run.value(column, i); return value > 0 ? value / 1000 : 0; };
    const forward = { name: "forward pass", colour: "h-device", of: (i) => (run.executed[i] - Math.max(run.scheduled[i], run.begin[i])) * 1000 };
    const parts = [["schedule_s", "h-schedule"], ["prepare_s", "h-prepare"], ["device_s", "h-device"], ["update_s", "h-update"], ["record_s", "h-record"]].filter(([column]) => run.has(column));
    const durations = measured || ticks ? parts.map(([column, colour]) => ({ name: column.slice(0, -2), colour, of: host(column) })) : [forward];
    // Where rounds overlap the host works beside the device: lines, as a stack would add them up.
    const beside = measured && run.facts.overlapped && [
      { name: "own time", colour: "c-mixed", of: (i) => (run.end[i] - run.begin[i]) * 1000 },
      { name: "host", colour: "h-schedule", of: (i) => parts.reduce((sum, [column]) => sum + (column === "device_s" ? 0 : host(column)(i)), 0) },
      { name: "device", colour: "h-device", of: host("device_s") },
    ];
    const timeUnit = measured ? "ms a round" : ticks ? "host, ms a round" : "ms a round, by the engine's formula";
    const lanes = [
      { title: "Batch", unit: "tokens", height: 120, keys: batch, note: budget ? `budget ${B.int(budget)}` : "", draw: (plane) => stack(plane, run, batch, { mark: budget, least: 1.5 }) },
      { title: "KV pool", unit: "blocks after the round", height: 84, keys: pool, note: total ? `${B.int(total)} blocks` : "", draw: (plane) => stack(plane, run, pool, { most: height, lasting: true }) },
      { title: "Queues", unit: "requests after the round", height: 84, keys: queues, draw: (plane) => { lines(plane, run, queues); return 1; } },
      { title: "Time", unit: timeUnit, height: 72, keys: beside || durations, draw: (plane) => (beside ? (lines(plane, run, beside), 1) : stack(plane, run, durations)) },
    ];
    const same = [];
    // A lane of its own: what the budget bounds is computed, and what is not would dwarf it.
    if (present("cached_tokens")) lanes.splice(1, 0, { title: "From the cache", unit: "tokens", height: 52, keys: cached, draw: (plane) => stack(plane, run, cached, { least: 1.5 }) });
    stripOrLine("Kind", "kind", B.kindColour);
    stripOrLine("Waiting loop stopped for", "stop_waiting", B.stopColour);
    stripOrLine("Running loop stopped for", "stop_running", B.stopColour);
    const modes = wordsOf("mode").filter((word) => word !== null);
    stripOrLine("Mode", "mode", (word) => (word === null ? null : ["c-used", "c-cached", "c-prefill", "c-decode"][modes.indexOf(word) % 4]));
    return [lanes, same];
  };

  B.freeText = (run, i) => run.freeMoments(i).map(B.int).join(" → ");

  // The figures of one round in a line, and what it did in words.
  B.readout = (run, i) => {
    const value = (column) => run.value(column, i), text = B.roundText(run, i);
    const tokens = [["decode", "decode_tokens"], ["prefill", "prefill_tokens"], ["cached", "cached_tokens"]].filter(([, column]) => value(column)).map(([name, column]) => `${name} ${B.int(value(column))}`);
    const facts = [
      `${text.kind}, ${B.int(value("num_seqs"))} sequence${value("num_seqs") === 1 ? "" : "s"}`, tokens.join(" + ") || "nothing fed",
      `free blocks ${B.freeText(run, i)}${run.facts.usable_blocks ? ` of ${B.int(run.facts.usable_blocks)}` : ""}`, `running ${B.int(value("running"))}, waiting ${B.int(value("waiting"))}`,
      B.logical ? B.moment(run.end[i]) : `${B.ms(run.end[i] - run.begin[i])} from ${B.moment(run.begin[i])}`,
    ];
    return [`Round ${B.int(run.round[i])}`, facts.join(" · "), [text.batch, text.why].filter(Boolean).join(" — ")];
  };

  B.legend = (keys) => keys.map(({ name, colour }) => B.el("span", { class: "key" }, B.el("i", { style: `background:var(--${colour})` }), name));

  B.startRounds = () => {
    B.$$(".lanes").forEach((box) => {
      const run = B.runs[+box.dataset.run], [lanes, same] = lanesOf(run), note = B.$(`#lanes-note-${run.place}`), behind = new Map();
      const readout = B.$(".readout", box);
      const say = (at) => {
        if (at === null || !run.n) return;
        const [head, facts, why] = B.readout(run, B.indexAt(run, at));
        readout.replaceChildren(B.el("strong", {}, head), " ", B.el("span", {}, facts), B.el("span", { class: "why" }, why));
      };
      lanes.forEach((lane, k) => {
        const plane = B.el("div");
        box.append(B.el("div", { class: "lane", "data-lane": lane.title }, B.el("div", { class: "lane-head" }, B.el("b", {}, lane.title), lane.unit ? B.el("span", { class: "unit" }, lane.unit) : null, B.legend(lane.keys), lane.note ? B.el("span", { class: "unit right" }, lane.note) : null), plane));
        const drawn = new B.Plane(plane, run, (lane.height + (k === lanes.length - 1 ? 20 : 0)) * B.scale, (p) => { behind.set(k, lane.draw(p)); later(); }, { axis: k === lanes.length - 1 });
        lane.plane = drawn;
      });
      if (same.length) box.append(B.el("p", { class: "note same" }, "In every round: ", same.flatMap(([title, word], k) => [k ? "; " : "", `${title[0].toLowerCase()}${title.slice(1)} `, B.el("code", {}, word)]), "."));
      let queued = false;
      const later = () => {
        if (queued) return;
        queued = true;
        requestAnimationFrame(() => {
          queued = false;
          const most = Math.max(...behind.values());
          note.textContent = most > 1 ? `Up to ${B.int(most)} rounds share a place here: those with the least and the most are drawn, exactly as recorded; the strips show shares. Zoom in for every round.` : "Every round in view is drawn.";
        });
      };
      B.on("cursor", say);
      B.keys(box, run);
      if (run.n) say(B.left(run, 0) + (B.right(run, 0) - B.left(run, 0)) / 2);
    });
    const range = B.$("#window-text");
    B.on("window", () => {
      const whole = view.lo <= view.whole[view.axis][0] && view.hi >= view.whole[view.axis][1];
      range.textContent = view.axis === "round" ? `rounds ${B.int(Math.ceil(view.lo))}–${B.int(Math.floor(view.hi))}` : B.stretch(view.lo, view.hi);
      B.$("#window-reset").hidden = whole;
    });
    B.$("#window-reset").addEventListener("click", B.resetWindow);
    B.$("#zoom-in").addEventListener("click", () => { const m = (view.lo + view.hi) / 2, w = (view.hi - view.lo) / 4; B.setWindow(m - w, m + w); });
    B.$("#zoom-out").addEventListener("click", () => { const m = (view.lo + view.hi) / 2, w = view.hi - view.lo; B.setWindow(m - w, m + w); });
    B.$$('input[name="axis"]').forEach((input) => input.addEventListener("change", () => B.setAxis(input.value)));

    // The table behind the lanes: the recorded figures of the rounds in view.
    B.$$("details.lane-data").forEach((details) => {
      const run = B.runs[+details.dataset.run], body = B.$("div", details), LIMIT = 500;
      const columns = ["kind", "num_seqs", "decode_tokens", "prefill_tokens", "cached_tokens", "free_blocks_end", "cached_free_blocks", "running", "waiting", "skipped", "stop_waiting", "stop_running"];
      const fill = () => {
        if (!details.open || !run.n) return;
        const first = B.indexAt(run, view.lo), last = Math.min(B.indexAt(run, view.hi), first + LIMIT - 1), rows = [];
        for (let i = first; i <= last; i++) rows.push([run.round[i], +run.start[i].toFixed(6), +run.end[i].toFixed(6), ...columns.map((column) => (run.words[column] ? run.word("rounds", column, i) : run.value(column, i)))]);
        body.replaceChildren(B.table(["round", ...(B.logical ? ["from tick", "to tick"] : ["start, s", "end, s"]), ...columns], rows));
        if (B.indexAt(run, view.hi) > last) body.append(B.el("p", { class: "note" }, `The first ${LIMIT} rounds of those in view; zoom in for others.`));
      };
      details.addEventListener("toggle", fill);
      B.on("window", fill);
    });
  };

  B.table = (head, rows) => {
    const numeric = head.map((_, k) => rows.some((row) => typeof row[k] === "number"));
    const cell = (tag, value, more = {}) => B.el(tag, { class: typeof value === "number" ? "n" : null, ...more }, value === null || value === undefined ? "–" : value instanceof Node ? value : typeof value === "number" ? String(+value.toPrecision(9)) : value);
    return B.el("div", { class: "scroll tall", tabindex: "0" }, B.el("table", {}, B.el("thead", {}, B.el("tr", {}, head.map((name, k) => B.el("th", { scope: "col", class: numeric[k] ? "n" : null }, name)))), B.el("tbody", {}, rows.map((row) => B.el("tr", {}, row.map((value) => cell("td", value)))))));
  };
})(globalThis.benchctl);
