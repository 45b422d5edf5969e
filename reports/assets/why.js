"use strict";
// Any round in full: its batch, who was held for want of what, who was preempted for whom, what was evicted; and the list of
// all rounds, searched by what they hold rather than by text, so that 100,000 of them answer at once.
((B) => {
  const ROW = 30 * B.scale;

  // -- masks over rounds: 1 where the round has what is asked for
  const marks = (run, places) => { const mask = new Uint8Array(run.n); for (const i of places) mask[i] = 1; return mask; };
  const union = (masks, n) => { const out = new Uint8Array(n); for (const mask of masks) for (let i = 0; i < n; i++) out[i] |= mask[i]; return out; };
  const byWord = (run, column, fits) => {
    const codes = run.tables.rounds[column], good = run.words[column].map((word) => word !== null && fits(word)), mask = new Uint8Array(run.n);
    for (let i = 0; i < run.n; i++) mask[i] = good[codes[i]] ? 1 : 0;
    return mask;
  };
  const byCount = (run, column) => Uint8Array.from(run.tables.rounds[column], (value) => (value > 0 ? 1 : 0));
  const byDecision = (run, fits) => {
    const mask = new Uint8Array(run.n);
    if (!run.facts.batches) return mask;
    const { decisions, evictions } = run.tables, kinds = run.words.decision, reasons = run.words.reason;
    const good = kinds.map((kind) => reasons.map((reason) => fits(kind, reason)));
    for (let d = 0; d < decisions.rows; d++) if (good[decisions.kind[d]][decisions.reason[d]]) mask[decisions.at[d]] = 1;
    if (fits("evict", "reused")) for (const i of evictions.at) mask[i] = 1;
    return mask;
  };
  const stalling = (run) => {
    const { running, num_seqs: fed, preempted, finished } = run.tables.rounds, mask = new Uint8Array(run.n);
    for (let i = 0; i < run.n; i++) mask[i] = running[i] + finished[i] > fed[i] && running[i] > 0 ? 1 : 0;
    return mask;
  };
  const EVENTS = {
    admitted: ["somebody was admitted", (run) => byCount(run, "admitted")], preempted: ["somebody was preempted", (run) => byCount(run, "preempted")],
    finished: ["somebody finished", (run) => byCount(run, "finished")], evicted: ["cached blocks were evicted", (run) => byCount(run, "evicted")],
    hit: ["the prefix cache was hit", (run) => byCount(run, "cached_tokens")], held: ["somebody was held or passed over", (run) => byDecision(run, (kind) => kind === "hold" || kind === "skip")],
    stalled: ["somebody running was not computed", stalling],
  };

  const ofRequests = (run, rows) => {
    const mask = new Uint8Array(run.n);
    if (!run.facts.batches) return mask;
    const { stretches, singles, decisions } = run.tables;
    for (const row of rows) {
      const request = run.tables.requests.request[row], about = run.ofRequest.get(request);
      if (!about) continue;
      for (const s of about.stretches) for (let k = run.decoding[stretches.at[s]], n = 0; n < stretches.count[s]; n++) mask[run.decodingRounds[k + n]] = 1;
      for (const s of about.singles) mask[singles.at[s]] = 1;
      for (const d of [...about.decisions, ...about.victims]) mask[decisions.at[d]] = 1;
    }
    return mask;
  };

  const searchWord = (run, word) => {
    const rows = [];
    for (let row = 0; row < run.labels.length; row++) if (run.labels[row].toLowerCase() === word || run.ids[row].toLowerCase() === word) rows.push(row);
    const masks = rows.length ? [ofRequests(run, rows)] : [];
    if (/^\d+$/.test(word)) {
      const i = run.placeOfRound(+word);
      if (run.round[i] === +word) masks.push(marks(run, [i]));
      return union(masks, run.n);
    }
    if (masks.length) return masks[0];
    const near = (text, meaning = "") => text.replaceAll("_", " ").includes(word) || text.includes(word) || (text.length > 3 && word.startsWith(text)) || meaning.toLowerCase().includes(word);
    masks.push(byWord(run, "kind", (kind) => near(kind)));
    for (const column of ["stop_waiting", "stop_running"]) masks.push(byWord(run, column, (stop) => near(stop, B.meta.stops[stop])));
    masks.push(byDecision(run, (kind, reason) => near(kind) || (reason !== "fits" && near(reason, B.meta.reasons[reason]))));
    if (word.length >= 2) for (let row = 0; row < run.ids.length && rows.length < 200; row++) if (run.ids[row].toLowerCase().includes(word)) rows.push(row);
    if (rows.length) masks.push(ofRequests(run, rows));
    return union(masks, run.n);
  };

  // Places of the rounds that fit everything asked for: text (words joined by and), kind, stop reason, event.
  B.search = (run, { text = "", kind = "", stop = "", event = "" } = {}) => {
    const masks = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => searchWord(run, word));
    if (kind) masks.push(byWord(run, "kind", (word) => word === kind));
    if (stop) masks.push(union(["stop_waiting", "stop_running"].map((column) => byWord(run, column, (word) => word === stop)), run.n));
    if (event) masks.push(EVENTS[event][1](run));
    const out = [];
    for (let i = 0; i < run.n; i++) if (masks.every((mask) => mask[i])) out.push(i);
    return out;
  };

  // -- one round in full
  const details = (run, i) => {
    const value = (column) => run.value(column, i), text = B.roundText(run, i), out = [];
    const who = (request) => B.requestLink(run, request);
    const list = (requests, limit = 60) => requests.length ? [requests.slice(0, limit).map((request, k) => [k ? " " : null, who(request)]), requests.length > limit ? ` +${requests.length - limit}` : null].flat(2) : ["nobody"];
    out.push(B.el("p", { class: "sentence" }, B.el("b", {}, text.batch), text.why ? ` — ${text.why}.` : "."));
    const pairs = [
      ["fed", `${B.int(value("prefill_tokens") + value("decode_tokens"))} tokens: ${B.int(value("decode_tokens"))} decode, ${B.int(value("prefill_tokens"))} prefill; ${B.int(value("budget_left"))} of the budget of ${B.int(run.facts.budget)} left`],
      ["prefix cache", value("queried_tokens") ? `${B.int(value("cached_tokens"))} of ${B.int(value("queried_tokens"))} tokens looked up were hit` : "nothing looked up"],
      ["free blocks", `${B.freeText(run, i)}${run.facts.usable_blocks ? ` of ${B.int(run.facts.usable_blocks)}` : ""}; ${B.int(value("cached_free_blocks"))} of the free ones hold reusable KV`],
      ["loops", ["stop_running", "stop_waiting"].map((column) => { const word = run.word("rounds", column, i); return `${column === "stop_running" ? "running" : "waiting"}: ${word === null ? "did not run" : `${word} (${B.meta.stops[word] || "?"})`}`; }).join("; ")],
      ["time", `${B.stretch(run.begin[i], run.end[i])}${B.logical ? "" : `, ${B.ms(run.end[i] - run.begin[i])}`}${run.begin[i] - run.start[i] > 1e-9 && !B.logical ? `, scheduled ${B.ms(run.begin[i] - run.start[i])} earlier while the round before ran` : ""}; ${run.word("rounds", "mode", i)}${value("padded_tokens") !== null ? `, ${B.int(value("padded_tokens"))} tokens with padding` : ""}`],
    ];
    const host = ["schedule_s", "prepare_s", "device_s", "update_s", "record_s"].filter((column) => value(column) !== null).map((column) => `${column.slice(0, -2)} ${B.hostMs(value(column) / 1e6)}`);
    if (host.length) pairs.push(["host and device", host.join(", ")]);
    if (value("flops") !== null) pairs.push(["work", `${B.flops(value("flops"))}, ${B.bytes(value("bytes") || 0)} of memory traffic`]);
    if (run.facts.batches) {
      const { waiting, running } = run.queues(i), batch = run.batch(i), decisions = run.decisions(i), evictions = run.evictions(i);
      pairs.push(["waiting before", B.el("span", {}, list(waiting))], ["running before", B.el("span", {}, list(running))]);
      const passed = running.filter((request) => !batch.some((row) => row.request === request) && !decisions.some((row) => row.kind === "preempt" && row.request === request));
      if (passed.length) pairs.push(["stalled", B.el("span", {}, list(passed))]);
      out.push(facts(pairs));
      const columns = ["", "request", "phase", "tokens", "fed", "cached", "prompt", "gives a token"];
      const rows = batch.map((row, k) => {
        const at = run.rowOf.get(row.request);
        return [k, who(row.request), row.decode ? "decode" : "prefill", `[${row.start}:${row.start + row.num_tokens}]`, row.num_tokens, row.cached_tokens, at === undefined ? null : B.orNull(run.tables.requests.prompt_tokens[at]), row.yields_token ? "yes" : "no"];
      });
      out.push(B.el("h4", {}, `Batch, ${batch.length} sequence${batch.length === 1 ? "" : "s"}${run.facts.ordered ? " in order" : ""}`), rows.length ? B.table(columns, rows) : B.el("p", { class: "note" }, "Nothing was scheduled."));
      const number = (count) => (count === null ? null : B.int(count));
      const told = decisions.map((row) => [row.kind, who(row.request), row.other === null ? "" : B.el("span", {}, "for ", who(row.other)), B.el("span", { title: B.meta.reasons[row.reason] || "" }, row.reason, " ", B.el("span", { class: "dim" }, B.meta.reasons[row.reason] || "")), number(row.needed), number(row.available), row.unit || ""]);
      for (const { request, count } of evictions) told.push(["evict", who(request), "", `took ${count} free block${count === 1 ? "" : "s"} that still held reusable KV`, count, null, "blocks"]);
      out.push(B.el("h4", {}, "Decisions"), told.length ? B.table(["decision", "request", "", "reason", "needed", "available", "unit"], told) : B.el("p", { class: "note" }, "None: steady decodes."));
    } else out.push(facts(pairs), B.el("p", { class: "note" }, "Batches and decisions of single rounds are not in this page."));
    return out;
  };
  const facts = (pairs) => B.el("dl", { class: "facts" }, pairs.map(([name, content]) => B.el("div", {}, B.el("dt", {}, name), B.el("dd", {}, content))));

  B.startWhy = () => {
    const section = B.$("#why");
    if (!section) return;
    let run = B.runs[0], found = [];
    const list = B.$(".vlist", section), spacer = B.$(".vspace", list), rows = B.$(".vrows", list), inspector = B.$(".inspector", section);
    const [find, kind, stop, event] = ["find", "kind", "stop", "event"].map((name) => B.$(`#why-${name}`)), count = B.$("#why-count"), tabs = B.$$('input[name="why-run"]');
    const number = B.$("#why-number");

    const fill = (select, words, label) => select.replaceChildren(B.el("option", { value: "" }, label), ...words.map(([value, text]) => B.el("option", { value }, text)));
    const setRun = (next) => {
      run = next;
      tabs.forEach((tab) => { tab.checked = B.runs[+tab.value] === run; });
      section.className = `run-${run.place % 6}`;
      const words = (column) => run.words[column].filter((word) => word !== null);
      fill(kind, words("kind").map((word) => [word, word]), "any kind");
      fill(stop, [...new Set([...words("stop_waiting"), ...words("stop_running")])].sort().map((word) => [word, word]), "any stop");
      fill(event, Object.entries(EVENTS).map(([name, [text]]) => [name, text]), "any event");
      number.max = run.n ? run.round[run.n - 1] : 1;
      filter();
    };
    const filter = () => {
      found = B.search(run, { text: find.value, kind: kind.value, stop: stop.value, event: event.value });
      count.textContent = `${B.int(found.length)} of ${B.int(run.n)} rounds`;
      spacer.style.height = `${found.length * ROW}px`;
      list.setAttribute("aria-rowcount", found.length + 1);
      list.scrollTop = 0;
      draw();
    };
    const draw = () => {
      const height = list.clientHeight || 400, first = Math.max(Math.floor(list.scrollTop / ROW) - 6, 0), last = Math.min(Math.ceil((list.scrollTop + height) / ROW) + 6, found.length);
      rows.style.transform = `translateY(${first * ROW}px)`;
      rows.replaceChildren(...found.slice(first, last).map((i, k) => {
        const text = B.roundText(run, i), chosen = B.chosen.run === run && B.chosen.i === i;
        const cell = (name, content, more = {}) => B.el("span", { role: "cell", class: name, title: typeof content === "string" ? content : null, ...more }, content);
        return B.el("div", { role: "row", class: chosen ? "vrow chosen" : "vrow", "aria-rowindex": first + k + 2, onclick: () => { B.show(run, i); } },
          cell("n", B.int(text.round)), cell("kindmark", text.kind, { style: `--mark:var(--${B.kindColour(text.kind)})` }), cell("", text.waiting), cell("", text.running), cell("", text.batch), cell("why", text.why), cell("", B.freeText(run, i)));
      }));
    };
    list.addEventListener("scroll", () => requestAnimationFrame(draw));
    // The row of round i comes into view, by as little as it takes; from afar, or where asked, to the middle. False: the search leaves it out.
    const reveal = (i, middle = false) => {
      const place = B.lower(found, i), top = place * ROW, height = list.clientHeight;
      if (found[place] !== i) return false;
      const off = top < list.scrollTop ? top - list.scrollTop : Math.max(0, top + 2 * ROW - list.scrollTop - height);
      if (middle || Math.abs(off) > height / 2) list.scrollTop = Math.max(0, top - (height - 2 * ROW) / 2);
      else if (off) list.scrollTop += off;
      return true;
    };
    list.addEventListener("keydown", (press) => {
      const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12 }[press.key];
      if (!move || !found.length) return;
      press.preventDefault();
      const here = B.chosen.run === run ? B.lower(found, B.chosen.i) : -1;
      const next = Math.max(0, Math.min(found.length - 1, here + move));
      B.show(run, found[next]);
    });
    [find, kind, stop, event].forEach((input) => input.addEventListener("input", filter));
    tabs.forEach((tab) => tab.addEventListener("change", () => { setRun(B.runs[+tab.value]); B.choose(run, B.chosen.run ? B.indexAt(run, B.view.cursor ?? 0) : 0); }));

    const title = B.$("h3", inspector), body = B.$(".body", inspector);
    B.on("round", (chosen, i) => {
      if (chosen !== run) setRun(chosen);
      title.textContent = `Round ${B.int(run.round[i])}${B.runs.length > 1 ? ` of ${run.name}` : ""}`;
      body.replaceChildren(...details(run, i));
      number.value = run.round[i];
      reveal(i);
      draw();
    });
    B.on("open", (_, i) => {
      if (!reveal(i, true)) {
        [find, kind, stop, event].forEach((input) => { input.value = ""; });
        filter();
        reveal(i, true);
      }
      draw();
      // Its row above, its detail below the middle of the window.
      scrollBy({ top: inspector.getBoundingClientRect().top - innerHeight * 0.45, behavior: "instant" });
      inspector.focus({ preventScroll: true });
      inspector.classList.remove("opened");
      inspector.getBoundingClientRect(); // so that it flashes each time
      inspector.classList.add("opened");
    });
    const step = (by) => B.show(run, (B.chosen.run === run ? B.chosen.i : -1) + by);
    B.$("#why-previous").addEventListener("click", () => step(-1));
    B.$("#why-next").addEventListener("click", () => step(1));
    number.addEventListener("change", () => B.show(run, run.placeOfRound(+number.value)));
    const within = (by) => {
      const here = B.chosen.run === run ? B.chosen.i : -1, place = B.lower(found, by > 0 ? here + 1 : here) - (by > 0 ? 0 : 1);
      if (place >= 0 && place < found.length) B.show(run, found[place]);
    };
    B.$("#why-next-found").addEventListener("click", () => within(1));
    B.$("#why-previous-found").addEventListener("click", () => within(-1));
    B.keys(inspector, B.runs[0]);
    B.onRedraw(draw);
    new ResizeObserver(draw).observe(list);
    setRun(run);
  };
})(globalThis.benchctl);
