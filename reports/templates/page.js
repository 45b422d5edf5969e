"use strict";
// Draws the figures embedded as JSON, in the theme's colours. Texts go in as text nodes only.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const drawn = new Map();
  let axis = "by_round";
  const TABLE_ROWS = 2000;
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];

  // -- theme: auto follows the system
  const media = matchMedia("(prefers-color-scheme: dark)");
  const store = {
    get: () => { try { return localStorage.getItem("benchctl-theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("benchctl-theme", value); } catch { /* a file may have no storage */ } },
  };
  const wish = new URLSearchParams(location.search).get("theme");
  let choice = ["light", "dark"].includes(wish) ? wish : store.get() || "auto";
  const button = document.getElementById("theme");
  const applyTheme = () => {
    root.dataset.theme = choice === "auto" ? (media.matches ? "dark" : "light") : choice;
    button.textContent = choice[0].toUpperCase() + choice.slice(1);
  };
  applyTheme();
  const redraw = () => drawn.forEach((_, id) => draw(id));
  media.addEventListener("change", () => { applyTheme(); redraw(); });
  button.addEventListener("click", () => {
    choice = { auto: "light", light: "dark", dark: "auto" }[choice];
    store.set(choice);
    applyTheme();
    redraw();
  });

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // -- one figure
  const dressed = (trace, figure) => {
    const out = { ...trace };
    const { c: role, dash, marks } = trace.meta || {};
    const tint = role === "owners" ? null : colour(`--c-${role}`);
    if (role === "owners") {
      const steps = [colour("--sunken"), colour("--c-cached"), ...Array.from({ length: 8 }, (_, i) => colour(`--o${i}`))];
      out.colorscale = steps.flatMap((c, i) => [[i / steps.length, c], [(i + 1) / steps.length, c]]);
    } else if (trace.type === "bar") {
      out.marker = { color: tint, line: { color: tint, width: trace.meta.outlined ? 1 : 0 } };
    } else if (marks) {
      out.marker = { color: tint, size: 8, line: { color: colour("--bg"), width: 1.5 } };
    } else {
      out.line = { ...trace.line, color: tint };
      if (dash !== undefined) out.line.dash = DASHES[dash % DASHES.length];
      if (trace.stackgroup) out.fillcolor = tint;
      // A state after a round: centred on its number, or from the moment of its end on.
      if (figure.by_round) out.line.shape = axis === "by_round" ? "hvh" : "hv";
    }
    if (!trace.x && figure[axis]) {
      out.x = figure[axis];
      if (trace.type === "bar") {
        // A batch fills its round: one number wide, or from its start to its end.
        if (axis === "by_time") out.x = figure.by_time.map((end, i) => end - figure.durations[i] / 2);
        out.width = axis === "by_time" ? figure.durations : figure.durations.map(() => 1);
      }
    }
    return out;
  };

  const layoutOf = (figure, narrow) => {
    const text = colour("--text"), dim = colour("--dim"), grid = colour("--grid");
    const base = { gridcolor: grid, linecolor: colour("--line"), zerolinecolor: grid, tickfont: { color: dim, size: 12 }, automargin: true };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: colour("--sans"), size: 13, color: text },
      margin: { l: narrow ? 44 : 60, r: 12, t: 34, b: 44 }, hovermode: figure.by_round ? "x unified" : "closest",
      hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: text, family: colour("--sans") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--line"), activecolor: dim }, dragmode: narrow ? false : "zoom", showlegend: true, ...structuredClone(figure.layout),
    };
    for (const key of ["xaxis", "yaxis", "yaxis2", "yaxis3"]) {
      if (!layout[key] && key !== "xaxis" && key !== "yaxis") continue;
      const own = layout[key] || {};
      layout[key] = { ...base, ...own, title: own.title ? { ...own.title, font: { color: dim, size: 12.5 }, standoff: 8 } : undefined };
    }
    for (const key of ["legend", "legend2", "legend3"]) {
      if (key !== "legend" && !layout[key]) continue;
      layout[key] = { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { color: text, size: narrow ? 11 : 12.5 }, itemwidth: 30, bgcolor: "rgba(0,0,0,0)", traceorder: "normal", ...layout[key] };
    }
    if (figure.by_round) layout.xaxis.title = { text: axis === "by_round" ? "round" : "time, s", font: { color: dim, size: 12.5 } };
    for (const shape of layout.shapes || []) shape.line.color = dim;
    for (const note of layout.annotations || []) note.font = { color: dim, size: 12 };
    return layout;
  };

  const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  function draw(id) {
    const box = document.getElementById(id), figure = figures[id];
    const narrow = box.clientWidth < 560;
    Plotly.react(box, figure.data.map((trace) => dressed(trace, figure)), layoutOf(figure, narrow), { ...CONFIG, displayModeBar: narrow ? false : "hover" });
    if (!drawn.has(id)) {
      drawn.set(id, true);
      if (figure.by_round) box.on("plotly_relayout", (change) => follow(id, change));
    }
  }

  // -- zoom of one run's rounds moves the others
  let following = false;
  function follow(id, change) {
    if (following) return;
    const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    const update = range[0] !== undefined ? { "xaxis.range": range } : change["xaxis.autorange"] ? { "xaxis.autorange": true } : null;
    if (!update) return;
    following = true;
    const others = [...drawn.keys()].filter((other) => other !== id && figures[other].by_round);
    Promise.all(others.map((other) => Plotly.relayout(other, update))).finally(() => { following = false; });
  }

  document.querySelectorAll('input[name="axis"]').forEach((input) => input.addEventListener("change", () => {
    axis = input.value;
    drawn.forEach((_, id) => { if (figures[id].by_round) draw(id); });
  }));

  // Figures are drawn when they come near, so that the first stands at once; printing draws them all.
  const near = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) { near.unobserve(entry.target); draw(entry.target.id); }
  }), { rootMargin: "800px" });
  document.querySelectorAll(".plot").forEach((box) => {
    box.style.minHeight = `${(figures[box.id].layout.height || 300)}px`;
    near.observe(box);
  });
  addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach((box) => { if (!drawn.has(box.id)) draw(box.id); }));

  // -- the table behind a figure
  const cell = (tag, value) => {
    const node = document.createElement(tag);
    node.textContent = value === null || value === undefined ? "–" : typeof value === "number" ? String(+value.toPrecision(6)) : String(value);
    if (typeof value === "number") node.className = "n";
    return node;
  };
  const rowsOf = (figure) => {
    const traces = figure.data.filter((trace) => trace.type !== "heatmap");
    if (figure.by_round) {
      const head = ["round", "end, s", ...traces.map((trace) => trace.name)];
      return [head, figure.by_round.map((round, i) => [round, figure.by_time[i], ...traces.map((trace) => trace.y[i])])];
    }
    if (!traces.length) {
      const map = figure.data[0];
      return [["block \\ round", ...map.x], map.y.map((block, i) => [block, ...map.customdata[i].map((owner) => (owner === null ? "free" : `#${owner}`))])];
    }
    const head = ["series", "x", "y"];
    return [head, traces.flatMap((trace) => trace.x.map((x, i) => [trace.name, x, trace.y[i]]))];
  };
  document.querySelectorAll("details.data").forEach((details) => details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const [head, rows] = rowsOf(figures[details.dataset.figure]);
    const box = document.createElement("div"), table = document.createElement("table"), top = document.createElement("thead"), body = document.createElement("tbody");
    box.className = "scroll tall";
    box.tabIndex = 0;
    top.append(document.createElement("tr"));
    head.forEach((name) => top.firstChild.append(cell("th", name)));
    rows.slice(0, TABLE_ROWS).forEach((row) => {
      const line = document.createElement("tr");
      row.forEach((value) => line.append(cell("td", value)));
      body.append(line);
    });
    table.append(top, body);
    box.append(table);
    details.append(box);
    if (rows.length > TABLE_ROWS) {
      const note = document.createElement("p");
      note.className = "note";
      note.textContent = `The first ${TABLE_ROWS} of ${rows.length} rows.`;
      details.append(note);
    }
  }));

  // -- search in the round tables
  document.querySelectorAll("details.rounds").forEach((box) => {
    const rows = [...box.querySelectorAll("tbody tr")], texts = rows.map((row) => row.textContent.toLowerCase());
    const find = box.querySelector(".find"), kind = box.querySelector(".kind"), count = box.querySelector(".count");
    const filter = () => {
      const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, i) => {
        const fits = words.every((word) => texts[i].includes(word)) && (!kind.value || row.dataset.kind === kind.value);
        row.hidden = !fits;
        shown += fits;
      });
      count.textContent = `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rounds`;
    };
    find.addEventListener("input", filter);
    kind.addEventListener("change", filter);
    filter();
  });
})();
