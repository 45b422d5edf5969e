"use strict";
// A round in words, as reports/rounds.py says it for the terminal; a test holds the two equal.
((B) => {
  const NOBODY = "–", LISTED = 4;
  const count = (number, noun) => `${B.int(number)} ${noun}${number === 1 ? "" : "s"}`;

  B.names = (run, requests) => {
    if (!requests.length) return NOBODY;
    const named = requests.map((request) => run.label(request));
    if (named.length <= LISTED) return named.join(" ");
    if (requests.every((request, i) => request === requests[0] + i)) return `${named[0]} … ${named.at(-1)}`;
    return `${named.slice(0, LISTED).join(" ")} +${B.int(named.length - LISTED)}`;
  };

  const isWhole = (row) => row.start === 0 && row.yields_token;
  const span = (run, row) => (isWhole(row) ? run.label(row.request) : `${run.label(row.request)}[${row.start}:${row.start + row.num_tokens}]`);

  B.batchText = (run, batch, running) => {
    const decodes = batch.filter((row) => row.decode), prefills = batch.filter((row) => !row.decode), parts = [];
    if (decodes.length) {
      const everybody = decodes.length === running.length;
      if (everybody || decodes.length > LISTED) parts.push(`decode × ${B.int(decodes.length)}${everybody ? "" : ` of ${B.int(running.length)}`}`);
      else parts.push(`decode ${B.names(run, decodes.map((row) => row.request))}`);
    }
    if (prefills.length) {
      const spans = prefills.slice(0, LISTED).map((row) => span(run, row));
      if (prefills.length > LISTED) spans.push(`+${B.int(prefills.length - LISTED)}`);
      const total = prefills.reduce((sum, row) => sum + row.num_tokens, 0);
      parts.push(`prefill ${spans.join(" ")}${prefills.every(isWhole) || prefills.length > 1 ? ` = ${B.int(total)}` : ""}`);
    }
    return parts.join(" + ") || NOBODY;
  };

  const needs = (row) => `(needs ${count(row.needed, "block")}, ${B.int(row.available)} free)`;
  const HOLDS = {
    not_first: (run, row) => `${count(row.available, "token")} of budget left < ${run.label(row.request)}'s ${B.int(row.needed)}, and only a round's first may be chunked`,
    blocks: (run, row, batch) => `${run.label(row.request)} does not fit ${needs(row)}${batch.some((one) => one.decode) ? ", and that does not stop the decodes" : ""}`,
    chunking_disabled: (run, row) => `${count(row.available, "token")} of budget left < ${run.label(row.request)}'s ${B.int(row.needed)}, and chunked prefill is off`,
    reserve_full_isl: (run, row) => `the whole of ${run.label(row.request)} does not fit ${needs(row)}: scheduler_reserve_full_isl`,
    watermark: (run, row) => `the watermark holds ${run.label(row.request)} back (needs ${count(row.needed, "block")} with it, ${B.int(row.available)} free)`,
    max_model_len: (run, row) => `${run.label(row.request)} stands at max_model_len`,
  };

  B.whyText = (run, i, batch, decisions, waiting, running) => {
    const nano = run.facts.scheduler === "nano", fed = new Map(batch.map((row) => [row.request, row]));
    const label = (request) => run.label(request), of = (...kinds) => decisions.filter((row) => kinds.includes(row.kind));
    const clauses = [];
    for (const row of of("preempt")) {
      const wanter = row.reason === "self" || row.other === null ? row.request : row.other, own = fed.get(wanter);
      const free = row.available ? `only ${B.int(row.available)}` : "none";
      const need = row.needed === 1 && (!own || own.decode) ? `${label(wanter)} crosses a block edge` : `${label(wanter)} needs ${count(row.needed, "block")}`;
      const rank = { newest: "the newest", lowest_priority: "the last by priority" }[row.reason] || row.reason;
      clauses.push(row.reason === "self" ? `${need} with ${free} free → it preempts itself` : `${need} with ${free} free → ${label(row.request)}, ${rank}, is preempted for it`);
    }
    for (const row of of("chunk")) {
      if (row.reason === "long_prefill_token_threshold" && fed.has(row.request)) clauses.push(`${label(row.request)} gets ${B.int(row.available)} of its ${B.int(row.needed)} tokens: long_prefill_token_threshold`);
    }
    const skips = of("skip");
    if (skips.length) {
      const first = skips[0];
      const taken = first.available !== null ? `every adapter place is taken (${B.int(first.available)} of ${B.int(first.available)})` : "no adapter place is free";
      clauses.push(`${B.names(run, skips.map((row) => row.request))} passed over, ${taken}`);
    }
    const holds = of("hold").map((row) => (HOLDS[row.reason] ? HOLDS[row.reason](run, row, batch) : `${label(row.request)} held: ${row.reason}`));
    const all = holds.length ? [...clauses, ...holds] : [...clauses, ...stops()];
    return [...new Set(all)].join("; ");

    function stops() {
      const waitingStop = run.word("rounds", "stop_waiting", i), runningStop = run.word("rounds", "stop_running", i), most = run.facts.max_num_seqs || batch.length;
      const cut = [];
      for (const row of of("chunk")) {
        const own = fed.get(row.request);
        if (row.reason !== "token_budget" || !own) continue;
        if (!nano) { cut.push(`${label(row.request)} gets ${B.int(row.available)} of its ${B.int(row.needed)} tokens`); continue; }
        cut.push(`${label(row.request)} stays at the head`);
        const admitted = of("admit", "resume").some((other) => other.request === row.request), size = run.facts.block_size;
        if (admitted && size && own.num_blocks * size > own.start + own.num_tokens) cut.push(`all ${B.int(own.num_blocks)} of its blocks are reserved at once`);
      }
      if (cut.length) return ["budget used up", ...cut];
      const left = running.filter((request) => !fed.has(request));
      if (runningStop === "token_budget") return ["budget used up", ...(left.length ? [`${B.names(run, left)} not reached`] : [])];
      if (runningStop === "max_num_seqs" && left.length) return [`max_num_seqs ${B.int(most)} reached, ${B.names(run, left)} not decoded`];
      if (waitingStop === "preemption") return waiting.length ? [`no admissions after a preemption: ${B.names(run, waiting)} ${waiting.length > 1 ? "wait" : "waits"}`] : [];
      if (waitingStop === "token_budget") return ["budget used up"];
      if (waitingStop === "max_num_seqs") return [`no seat left: max_num_seqs ${B.int(most)}`];
      if (of("preempt").length) return [];
      if (waitingStop === "waiting_empty" && (run.value("admitted", i) || runningStop === null)) {
        const fresh = of("admit", "resume");
        if (nano && fresh.length && running.length) return [`the newcomer${fresh.length > 1 ? "s stop" : " stops"} every decode for a round`];
        return ["waiting empty"];
      }
      if (waitingStop === null || waitingStop === "waiting_empty") return fed.size ? [`nothing left to run; ${count(fed.size, "sequence")}`] : [];
      return [B.meta.stops[waitingStop] || String(waitingStop)];
    }
  };

  // One line of the round table.
  B.roundText = (run, i) => {
    const free = run.freeMoments(i).map(B.int).join(" → "), kind = run.word("rounds", "kind", i), number = run.round[i];
    if (!run.facts.batches) {
      const tokens = ["decode", "prefill"].filter((phase) => run.value(`${phase}_tokens`, i)).map((phase) => `${phase} ${B.int(run.value(`${phase}_tokens`, i))} tokens`);
      const stops = ["stop_running", "stop_waiting"].map((column) => B.meta.stops[run.word("rounds", column, i)]).filter(Boolean);
      return { round: number, kind, waiting: "", running: "", batch: tokens.join(" + ") || NOBODY, why: stops.join("; "), free };
    }
    const batch = run.batch(i), decisions = run.decisions(i), { waiting, running } = run.queues(i);
    return {
      round: number, kind, waiting: B.names(run, waiting), running: B.names(run, running), batch: B.batchText(run, batch, running),
      why: B.whyText(run, i, batch, decisions, waiting, running), free,
    };
  };
})(globalThis.benchctl);
