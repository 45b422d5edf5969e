"use strict";
// The block map of a small pool: x = round, y = block, colour = owner. A slider steps through the rounds.
((B) => {
  const OWNERS = 8, MAX_HEIGHT = 560 * B.scale;

  // Per block the stretches in which nothing about it changes: [from round, to round, owners, cached].
  const stretchesOf = (run) => {
    const { blocks, hashed } = run.tables, { first_block: base, usable_blocks: total } = run.facts;
    const out = Array.from({ length: total }, () => []), now = Array.from({ length: total }, () => ({ from: 0, owners: [], cached: false }));
    const evicted = [];
    const close = (k, at) => { const state = now[k]; if (at > state.from) out[k].push([state.from, at, state.owners, state.cached]); state.from = at; };
    let e = 0, low = 0, high = 0;
    for (let at = 0; at < run.n; at++) {
      const touched = new Map();
      for (; e < blocks.rows && blocks.at[e] === at; e++) {
        const k = blocks.block[e] - base, event = run.words.event[blocks.event[e]], request = blocks.request[e];
        if (k < 0 || k >= total) continue;
        if (event === "evict") evicted.push([at, k]);
        if (!touched.has(k)) touched.set(k, [...now[k].owners]);
        const owners = touched.get(k);
        if (event === "allocate" || event === "share") owners.push({ request, index: blocks.index[e] });
        else if (event === "free" || event === "release") touched.set(k, owners.filter((owner) => owner.request !== request));
      }
      const masks = [hashed.low[at], hashed.high[at]];
      const flipped = masks[0] !== low || masks[1] !== high;
      for (let k = 0; k < total; k++) {
        const cached = flipped ? Math.floor(masks[k < 32 ? 0 : 1] / 2 ** (k % 32)) % 2 === 1 : now[k].cached;
        if (cached === now[k].cached && !touched.has(k)) continue;
        close(k, at);
        if (touched.has(k)) now[k].owners = touched.get(k);
        now[k].cached = cached;
      }
      [low, high] = masks;
    }
    for (let k = 0; k < total; k++) close(k, run.n);
    return [out, evicted];
  };

  const name = (run, owner) => `${run.label(owner.request)}.${owner.index}`;

  const drawMap = (run, stretches, evicted, rowHeight) => (plane) => {
    const g = plane.g, view = B.view, { first_block: base } = run.facts;
    const x0 = (i) => plane.x(B.left(run, i)), x1 = (i) => plane.x(i < run.n ? B.left(run, i) : B.right(run, run.n - 1));
    const wide = plane.width / Math.max(view.hi - view.lo, 1e-9);
    stretches.forEach((list, k) => {
      const y = plane.top + k * rowHeight, height = Math.max(rowHeight - 1, 1);
      if (rowHeight >= 11 * B.scale || k % Math.ceil((12 * B.scale) / rowHeight) === 0) plane.labels.push([String(base + k), y + height / 2]);
      let drawn = -Infinity;
      for (const [from, to, owners, cached] of list) {
        const x = x0(from), right = x1(to);
        if (right < B.MARGIN.left || x > B.MARGIN.left + plane.width) continue;
        if (right - drawn < 0.4) continue;
        const begin = Math.max(x, drawn), width = Math.max(right - begin, 0.6);
        drawn = right;
        if (owners.length) {
          g.fillStyle = B.colour(`o${Math.min(...owners.map((owner) => owner.request)) % OWNERS}`);
          g.fillRect(begin, y, width, height);
          if (cached) { g.fillStyle = B.colour("c-cached"); g.fillRect(begin, y + height - Math.max(height * 0.14, 1), width, Math.max(height * 0.14, 1)); }
          if (owners.length > 1) { g.strokeStyle = B.colour("text"); g.lineWidth = 1.5; g.strokeRect(begin + 0.75, y + 0.75, Math.max(width - 1.5, 0.5), height - 1.5); g.lineWidth = 1; }
        } else if (cached) {
          g.fillStyle = B.colour("c-cached-free");
          g.fillRect(begin, y, width, height);
        }
        const text = owners.length ? name(run, owners[0]) + (owners.length > 1 ? ` +${owners.length - 1}` : "") : "";
        const from_ = Math.max(begin, B.MARGIN.left), room = Math.min(right, B.MARGIN.left + plane.width) - from_;
        if (text && height >= 11 * B.scale && room > g.measureText(text).width + 6) {
          g.fillStyle = B.colour("cell");
          g.textAlign = "left";
          g.textBaseline = "middle";
          g.fillText(text, from_ + 3, y + height / 2);
        }
      }
    });
    if (wide >= 3 || evicted.length < 400) {
      g.fillStyle = B.colour("error");
      for (const [at, k] of evicted) {
        const x = x0(at), y = plane.top + k * rowHeight;
        if (x < B.MARGIN.left - 4 || x > B.MARGIN.left + plane.width) continue;
        g.beginPath();
        g.moveTo(x, y);
        g.lineTo(x + 5, y);
        g.lineTo(x, y + Math.min(5, rowHeight));
        g.fill();
      }
    }
  };

  B.startBlocks = () => B.$$(".blockcanvas").forEach((box) => {
    const run = B.runs[+box.dataset.run], slider = B.$("input", box), after = B.$(".after", box), cells = B.$(".cells", box), holder = B.$(".mapbox", box);
    const total = run.facts.usable_blocks, rowHeight = Math.max(Math.min(Math.floor(MAX_HEIGHT / total), 20 * B.scale), 7);
    if (holder) {
      let made = null;
      new B.Plane(holder, run, total * rowHeight + 26 * B.scale, (plane) => { made = made || stretchesOf(run); drawMap(run, made[0], made[1], rowHeight)(plane); }, { axis: true, top: 0 });
    }
    slider.max = Math.max(run.n - 1, 0);
    const show = (i) => {
      const pool = run.pool(i);
      after.textContent = `After round ${B.int(run.round[i])}: ${pool.filter((cell) => cell.owners.length).length} of ${total} blocks owned, ${pool.filter((cell) => !cell.owners.length && cell.cached).length} free but still cached`;
      slider.setAttribute("aria-valuetext", `round ${run.round[i]}`);
      cells.replaceChildren(...pool.map((cell) => {
        const owners = cell.owners.map((owner) => name(run, owner)), kind = owners.length ? `o${Math.min(...cell.owners.map((owner) => owner.request)) % OWNERS}` : "free";
        const words = `block ${cell.block}: ${owners.length ? owners.join(", ") : "free"}${cell.cached ? (owners.length ? "; hashed" : ", its content can still be hit") : ""}`;
        return B.el("li", { class: `${kind}${cell.cached ? " cached" : ""}${owners.length > 1 ? " shared" : ""}`, title: words }, B.el("small", {}, cell.block), B.el("span", {}, owners.length ? owners[0] + (owners.length > 1 ? ` +${owners.length - 1}` : "") : ""), B.el("span", { class: "visually-hidden" }, words));
      }));
      B.$$("[data-column]", box).forEach((cell) => cell.classList.toggle("here", +cell.dataset.column === i));
      slider.value = i;
    };
    slider.addEventListener("input", () => B.show(run, +slider.value));
    B.on("round", (chosen, i) => { if (chosen === run) show(i); });
    B.keys(box, run);
    if (run.n) show(0);
  });
})(globalThis.benchctl);
