"use strict";
// The pictures of a sweep: fronts, heat map, parallel axes, and the table that all of them lead to.
((B) => {
  B.meta = JSON.parse(B.$("#figures").textContent);
  B.paintAll = () => {};
  const S = B.meta.sweep, COLOURS = 6, MAX_LINES = 1500, MAX_LABELS = 12;
  const place = new Map(S.figures.map((figure, i) => [figure.key, i])), axisAt = new Map(S.axes.map((axis, i) => [axis.name, i]));
  const figureOf = (key) => S.figures[place.get(key)];
  const value = (row, key) => { const span = place.has(key) ? row.f[place.get(key)] : null; return span ? span[0] : null; };
  const span = (row, key) => { const all = row.f[place.get(key)]; return all.length === 3 ? all : [all[0], all[0], all[0]]; };
  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const complete = S.rows.filter((row) => row.s === "complete"), best = new Set(S.picks);
  const workloadOf = (row) => row.v.slice(0, S.workloads.length).join(" ");
  const workloads = [...new Set(S.rows.map(workloadOf))];
  const workloadName = (key) => key.split(" ").map((i, k) => `${S.workloads[k]} ${S.axes[k].values[+i]}`).join(", ");
  let only = workloads[0];
  const shown = (figure, v) => (v === null ? "–" : figure.unit === "%" ? `${(v * 100).toFixed(v > 0.9 ? 2 : 1)}%` : B.num(v));
  const here = () => complete.filter((row) => workloads.length < 2 || workloadOf(row) === only);
  const pick = () => here().find((row) => best.has(row.id));
  const option = (text, at, chosen) => B.el("option", { value: at, selected: chosen }, text);

  B.table = (head, rows) => B.el("div", { class: "scroll tall", tabindex: 0 }, B.el("table", {},
    B.el("thead", {}, B.el("tr", {}, head.map((text) => B.el("th", { scope: "col" }, text)))),
    B.el("tbody", {}, rows.map((row) => B.el("tr", {}, row.map((cell) => B.el("td", { class: typeof cell === "number" ? "n" : "" }, typeof cell === "number" ? B.num(cell) : cell)))))));

  // -- fronts
  const frontOf = (rows, key) => {
    const sorted = rows.slice().sort((a, b) => value(b, "output_throughput") - value(a, "output_throughput") || value(a, key) - value(b, key));
    let least = Infinity;
    return sorted.filter((row) => { const on = value(row, key) < least; if (on) least = value(row, key); return on; });
  };

  // 1, 2, 5, 10 … between two values; only powers of ten where they are far apart.
  const decades = (low, high) => {
    const out = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1; power++) for (const digit of high / low > 200 ? [1] : [1, 2, 5]) out.push(digit * 10 ** power);
    return out.filter((v) => v >= low / 2.5 && v <= high * 2.5);
  };

  const pareto = (key, colourBy) => {
    const rows = here().filter((row) => value(row, key) !== null && value(row, "output_throughput") !== null);
    const figure = figureOf(key), ys = rows.map((row) => value(row, key)), axis = colourBy < 0 ? null : S.axes[colourBy];
    const text = (row) => `${escaped(row.name)}<br>${B.num(value(row, "output_throughput"))} tokens/s, ${figure.label} ${B.num(value(row, key))} ms${value(row, "attainment") === null ? "" : `<br>${shown(figureOf("attainment"), value(row, "attainment"))} within the SLOs`}`;
    const points = (members, name, role) => {
      const trace = { type: "scatter", mode: "markers", name: escaped(name), meta: { c: role, marks: rows.length < 300 }, x: members.map((row) => value(row, "output_throughput")), y: members.map((row) => value(row, key)),
        text: members.map(text), customdata: members.map((row) => row.id), hovertemplate: "%{text}<extra></extra>" };
      if (S.repeats > 1) {
        const bar = (k) => { const spans = members.map((row) => span(row, k)); return { type: "data", symmetric: false, array: spans.map(([m, , high]) => high - m), arrayminus: spans.map(([m, low]) => m - low), thickness: 1, width: 0 }; };
        trace.error_x = bar("output_throughput");
        trace.error_y = bar(key);
      }
      return trace;
    };
    const front = frontOf(rows, key), line = { type: "scatter", mode: "lines", name: "not beaten", meta: { c: "used" }, line: { width: 1.5 }, hoverinfo: "skip", x: front.map((row) => value(row, "output_throughput")), y: front.map((row) => value(row, key)) };
    const groups = axis ? axis.values.map((name, i) => [rows.filter((row) => row.v[colourBy] === i), `${axis.name} ${name}`, `run${i % COLOURS}`]).filter(([members]) => members.length) : [[rows, "settings", "decode"]];
    const data = [line, ...groups.map((group) => points(...group))], winner = pick();
    if (winner && rows.includes(winner)) data.push({ ...points([winner], "best", "used"), name: "best", marker: { size: 18, symbol: "circle-open", opacity: 1, line: { width: 2.5 } }, error_x: undefined, error_y: undefined });
    const limit = S.slo[key], log = ys.length && Math.min(...ys) > 0 && Math.max(...ys) / Math.min(...ys) > 8;
    const layout = { height: 420, xaxis: { title: { text: "output tokens/s" } }, yaxis: { title: { text: `${figure.label}, ms` }, type: log ? "log" : "linear", rangemode: "tozero", ...(log ? { tickvals: decades(Math.min(...ys), Math.max(...ys)) } : {}) } };
    if (limit !== undefined && ys.length && limit < Math.max(...ys) * 3) layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit, y1: limit, line: { width: 1.5, dash: "dot" } }];
    return { data, layout, note: null };
  };

  const startFronts = () => {
    const boxes = B.$$(".plot").filter((box) => box.id.startsWith("pareto-"));
    if (!boxes.length) return;
    const choose = B.$("#colour-by");
    const fit = S.axes.map((axis, i) => i).filter((i) => i >= S.workloads.length && S.axes[i].values.length <= COLOURS);
    choose.append(...fit.map((i) => option(S.axes[i].name, i)), option("nothing", -1, !fit.length));
    const build = () => boxes.forEach((box) => { B.meta.figures[box.id] = pareto(box.id.slice("pareto-".length), +choose.value); });
    const again = () => { build(); B.$$("#trade details.data table").forEach((table) => table.parentElement.remove()); B.$$("#trade details.data").forEach((details) => { details.open = false; }); B.redrawFigures?.(); };
    build();
    choose.addEventListener("change", again);
    if (workloads.length > 1) {
      B.$("#only-label").hidden = false;
      const select = B.$("#only");
      select.append(...workloads.map((key) => option(workloadName(key), key)));
      select.addEventListener("change", () => { only = select.value; again(); drawHeat(); });
    }
  };

  // -- heat map
  let drawHeat = () => {};
  const startHeat = () => {
    const table = B.$("#heat-table");
    if (!table) return;
    const [figureBy, across, down, rest] = ["#heat-figure", "#heat-x", "#heat-y", "#heat-rest"].map((id) => B.$(id));
    // The two axes that move the objective most to begin with.
    const rank = (i) => { const at = S.matters.indexOf(S.axes[i].name); return at < 0 ? Infinity : at; };
    const order = S.axes.map((axis, i) => i).sort((a, b) => rank(a) - rank(b) || a - b);
    S.figures.forEach((figure, i) => figureBy.append(option(`${figure.label}, ${figure.unit}`, i, figure.key === S.objective)));
    S.axes.forEach((axis, i) => { across.append(option(axis.name, i, i === order[0])); down.append(option(axis.name, i, i === order[1])); });
    drawHeat = () => {
      const f = S.figures[+figureBy.value], x = +across.value, y = +down.value, winner = pick(), better = (a, b) => (f.higher ? a > b : a < b);
      const crossing = x < S.workloads.length || y < S.workloads.length;
      let rows = (crossing ? complete : here()).filter((row) => value(row, f.key) !== null);
      if (rest.value === "pick" && winner) rows = rows.filter((row) => row.v.every((v, i) => i === x || i === y || v === winner.v[i]));
      const cells = new Map();
      for (const row of rows) {
        const key = `${row.v[x]} ${row.v[y]}`;
        if (!cells.has(key) || better(value(row, f.key), value(cells.get(key), f.key))) cells.set(key, row);
      }
      const all = [...cells.values()].map((row) => value(row, f.key)), low = Math.min(...all), high = Math.max(...all);
      const log = f.unit === "ms" && low > 0 && high / low > 5, scale = (v) => (high === low ? 0.5 : log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
      const top = f.higher ? high : low;
      table.replaceChildren(
        B.el("thead", {}, B.el("tr", {}, B.el("th", { class: "corner", scope: "col" }, B.el("span", {}, `${S.axes[y].name} ↓`), " ", B.el("span", {}, `${S.axes[x].name} →`)), S.axes[x].values.map((name) => B.el("th", { scope: "col" }, name)))),
        B.el("tbody", {}, S.axes[y].values.map((name, j) => B.el("tr", {}, B.el("th", { scope: "row" }, name), S.axes[x].values.map((_, i) => {
          const row = cells.get(`${i} ${j}`);
          if (!row || (x === y && i !== j)) return B.el("td", { class: "none" }, "–");
          const v = value(row, f.key), w = Math.round((f.higher ? scale(v) : 1 - scale(v)) * 100);
          return B.el("td", { class: `${w > 62 ? "strong" : ""}${v === top ? " peak" : ""}`, style: `--w: ${w}%`, title: row.name, onclick: () => find(row.id) }, shown(f, v));
        })))));
      B.$("#heat-note").textContent = `${f.label}, ${f.unit === "%" ? "share of the requests" : f.unit}; a fuller colour is better, the frame marks the best.${rest.value === "best" ? " Every field shows the best value that any choice of the other axes gives." : ""}${log ? " Shades by the logarithm." : ""}${!crossing && workloads.length > 1 ? ` At ${workloadName(only)}.` : ""}`;
    };
    [figureBy, across, down, rest].forEach((select) => select.addEventListener("change", drawHeat));
    drawHeat();
  };

  // -- parallel axes
  const SVG = "http://www.w3.org/2000/svg";
  const draw = (tag, attributes, ...children) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, v] of Object.entries(attributes)) if (v !== null) node.setAttribute(name, v);
    node.append(...children);
    return node;
  };
  const filters = new Map(); // axis -> chosen values
  const passes = (row) => [...filters].every(([axis, values]) => values.has(row.v[axis]));
  const byId = new Map(S.rows.map((row) => [row.id, row]));

  const applyFilters = (paths) => {
    paths.forEach(([path, row]) => path.classList.toggle("off", !passes(row)));
    B.$$("#settings-table tbody tr").forEach((tr) => { tr.hidden = filters.size > 0 && !passes(byId.get(+tr.dataset.id)); });
    const left = S.rows.filter(passes).length;
    B.$("#parallel-note").textContent = filters.size ? `${B.int(left)} of ${B.int(S.rows.length)} settings go through the chosen values.` : `Figures are drawn with the better end up.${complete.length > MAX_LINES ? ` The best ${B.int(MAX_LINES)} of ${B.int(complete.length)} settings are drawn.` : ""}`;
    B.$("#parallel-reset").hidden = !filters.size;
  };

  const startParallel = () => {
    const box = B.$("#parallel-box");
    if (!box) return;
    const keys = [...new Set([S.objective, "attainment", "output_throughput", "p99_ttft_ms", "p99_itl_ms", "p50_ttft_ms"])].filter((key) => place.has(key) && complete.some((row) => value(row, key) !== null)).slice(0, 5);
    const headOf = (axis) => axis.name.replace("max-num-batched-tokens", "batched-tokens");
    const paint = () => {
      const columns = S.axes.length + keys.length, longest = Math.max(...S.axes.map((axis) => Math.min(headOf(axis).length, 17)), 13);
      // 7.6 px a bold character: names of neighbours keep apart, and where there is no room the picture scrolls.
      const width = Math.max(box.parentElement.clientWidth - 2, (columns - 1) * (longest * 7.6 + 10) + 120), height = 352, left = 58, right = 62, top = 56, bottom = 20;
      const xOf = (i) => left + (columns > 1 ? (i * (width - left - right)) / (columns - 1) : 0);
      const between = (share) => top + (1 - share) * (height - top - bottom);
      const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Parallel axes; the same is in the table below" });
      svg.style.minWidth = `${width}px`;
      const rows = complete.slice(0, MAX_LINES), scales = keys.map((key) => {
        const f = figureOf(key), all = rows.map((row) => value(row, key)).filter((v) => v !== null), low = Math.min(...all), high = Math.max(...all), log = f.unit === "ms" && low > 0 && high / low > 5;
        return { f, low, high, at: (v) => { const s = high === low ? 0.5 : log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low); return f.higher ? s : 1 - s; } };
      });
      const objective = scales[keys.indexOf(S.objective)];
      const decode = B.colour("c-decode"), pale = B.colour("c-queued"), strong = B.colour("c-preempted");
      const paths = rows.map((row, k) => {
        const jitter = rows.length > 1 ? ((k * 0.618) % 1 - 0.5) * 0.06 : 0;
        const points = row.v.map((v, i) => { const n = S.axes[i].values.length; return [xOf(i), between(n > 1 ? Math.min(Math.max(v / (n - 1) + jitter * Math.min(1, 6 / n), -0.03), 1.03) : 0.5)]; });
        keys.forEach((key, i) => { const v = value(row, key); if (v !== null) points.push([xOf(S.axes.length + i), between(scales[i].at(v))]); });
        const v = value(row, S.objective), w = v === null ? 0 : Math.round(objective.at(v) * 100), chosen = best.has(row.id);
        const path = draw("path", { d: points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""), class: chosen ? "best" : null, stroke: chosen ? strong : `color-mix(in oklab, ${decode} ${w}%, ${pale})` }, draw("title", {}, row.name));
        path.addEventListener("click", () => find(row.id));
        return [path, row];
      });
      svg.append(...paths.filter(([, row]) => !best.has(row.id)).reverse().map(([path]) => path), ...paths.filter(([, row]) => best.has(row.id)).map(([path]) => path));
      const head = (i, text, unit) => { const label = draw("text", { x: xOf(i), y: unit ? 13 : 21, "text-anchor": "middle", class: "head" }, text.length > 17 ? `${text.slice(0, 16)}…` : text); label.append(draw("title", {}, text)); svg.append(draw("line", { x1: xOf(i), x2: xOf(i), y1: top, y2: height - bottom }), label); if (unit) svg.append(draw("text", { x: xOf(i), y: 28, "text-anchor": "middle" }, unit)); };
      S.axes.forEach((axis, i) => {
        head(i, headOf(axis));
        const n = axis.values.length, step = n > MAX_LABELS ? n - 1 : 1;
        for (let v = 0; v < n; v += step) {
          const text = axis.values[v].length > 13 ? `${axis.values[v].slice(0, 12)}…` : axis.values[v], y = between(n > 1 ? v / (n - 1) : 0.5), half = 4 + text.length * 3.6;
          const group = draw("g", { class: "value", tabindex: 0, role: "button", "aria-label": `${axis.name} ${axis.values[v]}`, "aria-pressed": "false" }, draw("rect", { x: xOf(i) - half, y: y - 9, width: 2 * half, height: 18 }), draw("text", { x: xOf(i), y: y + 4, "text-anchor": "middle" }, text));
          const mark = () => { const on = Boolean(filters.get(i)?.has(v)); group.classList.toggle("on", on); group.setAttribute("aria-pressed", on); };
          const toggle = () => {
            const values = filters.get(i) || new Set();
            if (values.has(v)) values.delete(v); else values.add(v);
            if (values.size) filters.set(i, values); else filters.delete(i);
            mark();
            applyFilters(paths);
          };
          if (step === 1) {
            group.addEventListener("click", toggle);
            group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } });
          }
          mark();
          svg.append(group);
        }
      });
      scales.forEach(({ f, low, high }, i) => {
        head(S.axes.length + i, f.label.replace("output throughput", "throughput"), f.unit);
        for (const [at, v] of [[1, f.higher ? high : low], [0, f.higher ? low : high]]) svg.append(draw("text", { x: xOf(S.axes.length + i), y: between(at) + (at ? -3 : 14), "text-anchor": "middle" }, shown(f, v)));
      });
      box.replaceChildren(svg);
      applyFilters(paths);
    };
    paint();
    B.onRedraw(paint);
    let before = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== before) { before = innerWidth; paint(); } });
    B.$("#parallel-reset").addEventListener("click", () => { filters.clear(); paint(); });
  };

  // -- the table
  const find = (id) => {
    B.$$(".settings-table .chosen").forEach((tr) => tr.classList.remove("chosen"));
    const tr = B.$(`.settings-table tr[data-id="${+id}"]`);
    if (!tr) return;
    tr.classList.add("chosen");
    tr.scrollIntoView({ block: "center" });
  };
  B.onPoint = (data) => { if (typeof data === "number") find(data); };
  const startTable = () => {
    const body = B.$("#settings-table tbody"), heads = B.$$("#settings-table th");
    const read = (tr, i) => { const text = tr.cells[i].textContent.replace(/,/g, ""), n = parseFloat(text); return Number.isNaN(n) ? text : n; };
    const compare = (a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
    heads.forEach((th, i) => B.$("button", th).addEventListener("click", () => {
      const descending = th.getAttribute("aria-sort") ? th.getAttribute("aria-sort") === "ascending" : th.classList.contains("n");
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", descending ? "descending" : "ascending");
      body.append(...[...body.rows].map((tr) => [read(tr, i), tr]).sort(([a], [b]) => (typeof a === "string" || typeof b === "string" ? compare(a, b) : compare(a, b) * (descending ? -1 : 1))).map(([, tr]) => tr));
    }));
  };

  const fail = (error) => {
    console.error(error);
    const box = B.$("#trouble");
    box.hidden = false;
    box.textContent = `The pictures of this page could not be drawn: ${error.message}. A browser of 2023 or later is needed.`;
  };
  const start = async () => {
    B.startTheme();
    startTable();
    startHeat();
    startParallel();
    startFronts();
    const code = new TextDecoder().decode(await B.inflate(B.$("#plotly").textContent.trim())), script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
    B.startFigures();
  };
  B.ready = start().catch(fail);
})(globalThis.benchctl);
