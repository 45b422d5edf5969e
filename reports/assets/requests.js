"use strict";
// Every request over the shared axis: queued, prefill chunks, decode, stalled, preempted; and one request's life as a table.
((B) => {
  const view = B.view, PHASES = ["queued", "prefill", "decode", "stalled", "preempted"];
  const ROOM = 420 * B.scale, LEAST_ROW = 1.6 * B.scale; // pixels for the rows of a timeline, and of one row

  // Stretches of a request in seconds: [phase, from, to, round at its beginning]. `stalled` lies over decode and prefill.
  B.phases = (run, row) => {
    const { requests, stretches, singles, decisions, rounds } = run.tables, time = (name) => { const v = B.orNull(requests[name][row]); return v === null ? null : v / 1e6; };
    const request = requests.request[row], arrival = time("arrival_s"), first = time("first_scheduled_s"), token = time("first_token_s"), finished = time("finished_s"), out = [];
    const end = finished ?? run.facts.duration_s;
    if (run.words.status[requests.status[row]] === "rejected") return [["rejected", arrival, arrival, null]];
    out.push(["queued", arrival, first ?? end, null]);
    if (first === null) return out;
    const about = run.facts.batches ? run.ofRequest.get(request) : null;
    if (!about) {
      out.push(["prefill", first, token ?? end, null]);
      if (token !== null) out.push(["decode", token, end, null]);
      return out;
    }
    const lost = []; // [round it lost its blocks in, round that gave it new ones]
    let since = null;
    for (const d of about.decisions) {
      const kind = run.words.decision[decisions.kind[d]];
      if (kind === "preempt") since = decisions.at[d];
      else if (kind === "resume" && since !== null) { lost.push([since, decisions.at[d]]); since = null; }
    }
    if (since !== null) lost.push([since, run.n]);
    const pieces = [];
    for (const s of about.singles) pieces.push([singles.at[s], singles.at[s], singles.decode[s] ? "decode" : "prefill"]);
    for (const s of about.stretches) pieces.push([stretches.at[s], run.stretchEnd[s], "decode"]);
    pieces.sort((a, b) => a[0] - b[0]);
    let last = null;
    for (const [from, to, phase] of pieces) {
      if (last !== null && from > last + 1) {
        // Up to the round that took its blocks, or up to its next row.
        const taken = lost.find(([a, b]) => a > last && b <= from);
        const until = taken ? taken[0] : from;
        if (until > last + 1) out.push(["stalled", run.end[last], run.begin[until], last + 1]);
      }
      out.push([phase, last === null ? first : run.begin[from], run.end[to], from]);
      // Rounds inside a stretch that decode nobody.
      if (phase === "decode") {
        for (let k = run.decoding[from]; k < run.decoding[to]; k++) {
          const a = run.decodingRounds[k], b = run.decodingRounds[k + 1];
          if (b > a + 1) out.push(["stalled", run.end[a], run.begin[b], a + 1]);
        }
      }
      last = to;
    }
    const effect = (i) => Math.max(run.scheduled[i], run.begin[i]); // where rounds overlap the one before has to end first
    for (const [from, to] of lost) out.push(["preempted", effect(from), to < run.n ? effect(to) : run.facts.duration_s, from]);
    return out.filter((piece) => piece[2] > piece[1]);
  };

  const value = (run, name, row) => B.orNull(run.tables.requests[name][row]);
  const span = (run, row, from, to) => { const a = value(run, from, row), b = value(run, to, row); return a === null || b === null ? null : (b - a) / 1e6; };
  const ORDERS = {
    arrival: (run, row) => value(run, "arrival_s", row) ?? Infinity, e2el: (run, row) => -(span(run, row, "arrival_s", "finished_s") ?? Infinity), ttft: (run, row) => -(span(run, row, "arrival_s", "first_token_s") ?? Infinity),
    queue: (run, row) => -(span(run, row, "arrival_s", "first_scheduled_s") ?? Infinity), stalled: (run, row) => -(value(run, "stalled_s", row) ?? 0), preemptions: (run, row) => -(value(run, "preemptions", row) ?? 0),
  };
  B.requestOrder = (run, by) => Array.from({ length: run.tables.requests.rows }, (_, row) => row).map((row) => [ORDERS[by](run, row), row]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map((pair) => pair[1]);

  B.requestLink = (run, request) => {
    const row = run.rowOf.get(request), label = run.label(request);
    return row === undefined ? B.el("span", {}, label) : B.el("button", { type: "button", class: "link", title: run.ids[row], onclick: () => B.showRequest(run, row) }, label);
  };

  // -- one life
  const needs = ({ needed, available, unit }) => `needs ${B.int(needed)} ${needed === 1 ? (unit || "").replace(/s$/, "") : unit || ""}, ${B.int(available)} there`;
  B.life = (run, row) => {
    const { requests, singles, stretches, decisions } = run.tables, request = requests.request[row], lines = [];
    const time = (name) => { const v = value(run, name, row); return v === null ? null : v / 1e6; };
    const at = (t, round, what, numbers = "") => { if (t !== null) lines.push([t, round, what, numbers]); };
    at(time("arrival_s"), null, "arrives", `${B.int(value(run, "prompt_tokens", row))} prompt tokens${value(run, "output_tokens", row) === null ? "" : `, ${B.int(value(run, "output_tokens", row))} to emit`}`);
    if (value(run, "joined", row) !== null) at(time("admitted_s"), value(run, "joined", row), "handed to the scheduler", `seen first by this round's schedule()`);
    const about = run.facts.batches ? run.ofRequest.get(request) : null;
    if (about) {
      let held = null;
      const flush = () => { if (held) at(run.start[held.from], held.from, `held: ${held.reason}`, `${held.times > 1 ? `in ${B.int(held.times)} rounds up to ${B.int(run.round[held.to])}; first: ` : ""}${held.needed === null ? "" : needs(held)}`); held = null; };
      for (const d of about.decisions) {
        const row = run.decision(d), numbers = row.needed === null ? "" : needs(row);
        if (row.kind === "hold" || row.kind === "skip") {
          if (held && held.reason === row.reason) { held.times++; held.to = row.at; continue; }
          flush();
          held = { ...row, from: row.at, to: row.at, times: 1 };
          continue;
        }
        flush();
        const words = { admit: "admitted", resume: "resumed", preempt: row.other === null || row.other === request ? "preempts itself" : `preempted for ${run.label(row.other)}`, finish: `finishes: ${row.reason}`, reject: `refused: ${row.reason}`, chunk: `cut to ${B.int(row.available)} of ${B.int(row.needed)} tokens: ${row.reason}` };
        at(row.kind === "finish" ? run.end[row.at] : run.scheduled[row.at], row.at, words[row.kind] || row.kind, row.kind === "chunk" || row.kind === "finish" ? "" : row.kind === "admit" || row.kind === "resume" ? `takes ${B.int(row.needed)} of ${B.int(row.available)} free blocks` : numbers);
      }
      flush();
      for (const s of about.singles) at(run.start[singles.at[s]], singles.at[s], singles.decode[s] ? "decode" : "prefill", `tokens [${singles.start[s]}:${singles.start[s] + singles.num_tokens[s]}]${B.orNull(singles.cached_tokens[s]) ? `, ${B.int(singles.cached_tokens[s])} more were cached` : ""}`);
      for (const s of about.stretches) at(run.start[stretches.at[s]], stretches.at[s], `decodes for ${B.int(stretches.count[s])} round${stretches.count[s] === 1 ? "" : "s"}`, `up to round ${B.int(run.round[run.stretchEnd[s]])}`);
      const stalls = B.phases(run, row).filter((piece) => piece[0] === "stalled").sort((a, b) => b[2] - b[1] - (a[2] - a[1]));
      for (const [, from, to, i] of stalls.slice(0, 12)) at(from, i, "stalled", `${B.ms(to - from)}: ${run.word("rounds", "kind", i)} round without it${stalls.length > 12 ? ` (one of the 12 longest of ${B.int(stalls.length)})` : ""}`);
    } else {
      at(time("first_scheduled_s"), null, "first scheduled");
    }
    at(time("first_token_s"), time("first_token_s") === null ? null : run.placeOfTime(time("first_token_s") - 1e-7), "first token", `TTFT ${B.ms(span(run, row, "arrival_s", "first_token_s"))}`);
    return lines.map((line, k) => [line, k]).sort((a, b) => a[0][0] - b[0][0] || a[1] - b[1]).map((pair) => pair[0]);
  };

  B.showRequest = (run, row, how = {}) => {
    const box = B.$(`#life-${run.place}`), request = run.tables.requests.request[row];
    B.request = { run, row };
    const facts = [["TTFT", span(run, row, "arrival_s", "first_token_s")], ["E2E", span(run, row, "arrival_s", "finished_s")], ["queue", span(run, row, "arrival_s", "first_scheduled_s")], ["prefill", span(run, row, "first_scheduled_s", "first_token_s")], ["decode", span(run, row, "first_token_s", "finished_s")], ["stalled", (value(run, "stalled_s", row) ?? 0) / 1e6], ["preempted", (value(run, "preempted_s", row) ?? 0) / 1e6]];
    box.hidden = false;
    box.replaceChildren(
      B.el("h4", {}, `Request ${run.ids[row]}`, run.ids[row] === run.label(request) ? "" : ` (${run.label(request)})`, `: ${run.words.status[run.tables.requests.status[row]]}`),
      B.el("p", { class: "note" }, facts.map(([name, seconds]) => `${name} ${B.ms(seconds)}`).join(" · ")),
      B.table([B.logical ? "tick" : "time, s", "round", "what", ""], B.life(run, row).map(([t, i, what, numbers]) => [+t.toFixed(6), i === null ? null : B.roundLink(run, i), what, numbers])),
    );
    if (!how.quiet) box.scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    B.gantts.get(run)?.();
  };
  B.gantts = new Map();

  B.startRequests = () => {
    B.$$(".gantt").forEach((box) => {
      const run = B.runs[+box.dataset.run], scroller = B.$(".gantt-scroll", box), holder = B.$(".gantt-view", scroller), spacer = B.$(".gantt-space", scroller), by = B.$("select", box), tip = B.$(".tip", box), find = B.$('input[type="search"]', box);
      let order = [], row = 14;
      const cache = new Map();
      const phases = (one) => { if (!cache.has(one)) { if (cache.size > 3000) cache.clear(); cache.set(one, B.phases(run, one)); } return cache.get(one); };
      let sorted = null, seen = "";
      // Rows: the requests that are there in the part in view and fit the search, as tall as the room allows.
      const arrange = () => {
        const text = find.value.trim().toLowerCase(), [from, to] = B.windowTimes(run), { requests } = run.tables;
        sorted = sorted || B.requestOrder(run, by.value);
        order = sorted.filter((one) => {
          const begin = requests.arrival_s[one] / 1e6, end = requests.finished_s[one] > 0 ? requests.finished_s[one] / 1e6 : run.facts.duration_s;
          return begin <= to && Math.max(end, begin) >= from && (!text || run.ids[one].toLowerCase().includes(text) || run.labels[one].toLowerCase() === text);
        });
        const there = order.length;
        if (there * LEAST_ROW > 2.5 * ROOM) {
          // Of neighbours in the order the slowest (by arrival) or the first, so that what is long is always seen.
          const step = Math.ceil((there * LEAST_ROW) / ROOM), slowest = ORDERS.e2el, kept = [];
          for (let k = 0; k < there; k += step) kept.push(by.value === "arrival" ? order.slice(k, k + step).reduce((a, b) => (slowest(run, b) < slowest(run, a) ? b : a)) : order[k]);
          order = kept;
        }
        row = Math.max(Math.min(ROOM / Math.max(order.length, 1), 18 * B.scale), LEAST_ROW);
        const count = order.length < there ? `${B.int(order.length)} of ${B.int(there)} requests drawn, of every ${Math.ceil(there / order.length)} the slowest: zoom in or search for others` : `${B.int(there)} of ${B.plural(requests.rows, "request")}`;
        if (count !== seen) B.$(".gantt-count", box).textContent = seen = count;
        const height = Math.round(Math.min(Math.max(order.length * row, 60), ROOM) + 24 * B.scale);
        scroller.style.height = `${height + 2}px`;
        plane.setHeight(height);
        spacer.style.height = `${Math.max(order.length * row + 24 * B.scale, height)}px`;
      };
      const draw = (p) => {
        const g = p.g, top = scroller.scrollTop, first = Math.floor(top / row), last = Math.min(Math.ceil((top + p.bottom) / row), order.length);
        g.save();
        g.beginPath();
        g.rect(B.MARGIN.left, 0, p.width, p.bottom);
        g.clip();
        for (let k = first; k < last; k++) {
          const one = order[k], y = k * row - top + (row > 6 ? 1 : 0), height = row - (row > 6 ? 2 : row > 3 ? 1 : 0.5);
          if (B.request && B.request.run === run && B.request.row === one) { g.fillStyle = B.colour("sunken"); g.fillRect(B.MARGIN.left, y - 1, p.width, row); }
          for (const name of PHASES) {
            g.fillStyle = B.colour(`c-${name}`);
            let drawn = -1;
            for (const [phase, from, to] of phases(one)) {
              if (phase !== name) continue;
              const x = p.x(B.atTime(run, from)), right = p.x(B.atTime(run, to));
              if (right < B.MARGIN.left || x > B.MARGIN.left + p.width || right <= drawn) continue;
              const thin = phase === "queued" ? Math.max(height * 0.36, 2) : height, width = Math.max(right - Math.max(x, drawn), phase === "queued" ? 0.5 : 0.8);
              g.fillRect(Math.max(x, drawn), y + (height - thin) / 2, width, thin);
              drawn = Math.max(x, drawn) + width;
            }
          }
          if (phases(one)[0]?.[0] === "rejected") { g.fillStyle = B.colour("error"); g.fillText("✗", p.x(B.atTime(run, phases(one)[0][1])), y + height / 2); }
          if (row >= 11) p.labels.push([run.label(run.tables.requests.request[one]).slice(0, 8), y + height / 2]);
        }
        g.restore();
      };
      B.on("window", () => arrange()); // before the picture, which listens after it
      const plane = new B.Plane(holder, run, 200, draw, { axis: true, top: 0 });
      const under = (event) => order[Math.floor((event.clientY - holder.getBoundingClientRect().top + scroller.scrollTop) / row)];
      plane.click = (event) => {
        const one = under(event);
        if (one === undefined) return false;
        B.showRequest(run, one);
        return true;
      };
      plane.hover = (event) => {
        const one = under(event), edge = box.getBoundingClientRect(), t = plane.at(event.clientX - holder.getBoundingClientRect().left);
        tip.hidden = one === undefined;
        if (one === undefined) return;
        const piece = phases(one).filter(([, from, to]) => B.atTime(run, from) <= t && t <= B.atTime(run, to)).sort((a, b) => PHASES.indexOf(b[0]) - PHASES.indexOf(a[0]))[0];
        tip.textContent = `${run.ids[one]}: ${piece ? `${piece[0]} ${B.ms(piece[2] - piece[1])}` : "not there"} · TTFT ${B.ms(span(run, one, "arrival_s", "first_token_s"))} · E2E ${B.ms(span(run, one, "arrival_s", "finished_s"))}`;
        tip.style.left = `${Math.min(event.clientX - edge.left + 14, edge.width - Math.min(tip.offsetWidth, edge.width) - 4)}px`;
        tip.style.top = `${event.clientY - edge.top + 16}px`;
      };
      plane.leave = () => { tip.hidden = true; };
      scroller.addEventListener("scroll", () => plane.redraw());
      scroller.addEventListener("keydown", (press) => {
        const move = { ArrowDown: 1, ArrowUp: -1 }[press.key];
        if (!move || !order.length) return;
        press.preventDefault();
        press.stopPropagation();
        const here = B.request && B.request.run === run ? order.indexOf(B.request.row) : -1, next = Math.max(0, Math.min(order.length - 1, here + move));
        scroller.scrollTop = Math.max(0, next * row - 180);
        B.showRequest(run, order[next], { quiet: true });
      });
      const again = () => { arrange(); plane.redraw(); };
      by.addEventListener("input", () => { sorted = null; scroller.scrollTop = 0; again(); });
      find.addEventListener("input", () => { scroller.scrollTop = 0; again(); });
      B.gantts.set(run, () => plane.redraw());
      B.keys(box, run);
      arrange();
    });

    B.$$("details.request-data").forEach((details) => details.addEventListener("toggle", () => {
      const run = B.runs[+details.dataset.run], body = B.$("div", details), { requests } = run.tables, LIMIT = 1000;
      if (!details.open || body.childElementCount) return;
      const counts = ["prompt_tokens", "emitted_tokens", "cached_tokens", "recomputed_tokens", "preemptions"];
      const rows = B.requestOrder(run, B.$(`#order-${run.place}`).value).slice(0, LIMIT).map((row) => [
        B.requestLink(run, requests.request[row]), run.ids[row], run.words.status[requests.status[row]] + (["max_tokens", null].includes(run.words.end[requests.reason[row]]) ? "" : `: ${run.words.end[requests.reason[row]]}`),
        value(run, "arrival_s", row) === null ? null : value(run, "arrival_s", row) / 1e6, ...counts.map((name) => value(run, name, row)),
        B.latency(span(run, row, "arrival_s", "first_token_s")), B.latency(span(run, row, "arrival_s", "finished_s")), B.latency(span(run, row, "arrival_s", "first_scheduled_s")), B.latency(span(run, row, "first_scheduled_s", "first_token_s")), B.latency(span(run, row, "first_token_s", "finished_s")),
        B.latency((value(run, "stalled_s", row) ?? 0) / 1e6), B.latency((value(run, "preempted_s", row) ?? 0) / 1e6),
      ]);
      body.append(B.table(["request", "id", "status", B.logical ? "arrival, tick" : "arrival, s", "prompt", "output", "cached", "recomputed", "preemptions", ...["TTFT", "E2E"].map((name) => `${name}, ${B.logical ? "rounds" : "ms"}`), "queue", "prefill", "decode", "stalled", "preempted"], rows));
      if (requests.rows > LIMIT) body.append(B.el("p", { class: "note" }, `The first ${B.int(LIMIT)} of ${B.int(requests.rows)} in the order chosen above.`));
    }));
  };
})(globalThis.benchctl);
