"use strict";
// The Plotly figures embedded as JSON (reports/figures.py), in the theme's colours, each with its table.
((B) => {
  const drawn = new Set(), TABLE_ROWS = 2000;
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];

  const dressed = (trace) => {
    const out = { ...trace }, { c: role, dash, marks } = trace.meta || {}, tint = B.colour(`c-${role}`);
    if (trace.type === "bar") out.marker = { color: tint, line: { width: 0 } };
    else if (trace.mode === "markers") out.marker = { color: tint, size: marks ? 8 : 5, opacity: marks ? 1 : 0.65, line: { color: B.colour("bg"), width: marks ? 1.5 : 0.5 }, ...(trace.marker || {}) };
    else {
      out.line = { ...trace.line, color: tint };
      if (dash !== undefined) out.line.dash = DASHES[dash % DASHES.length];
      if (trace.stackgroup) { out.fillcolor = tint; out.line.width = 0; }
    }
    return out;
  };

  const layoutOf = (figure, narrow) => {
    const text = B.colour("text"), dim = B.colour("dim"), grid = B.colour("grid"), family = B.colour("sans");
    const base = { gridcolor: grid, linecolor: B.colour("line"), zerolinecolor: grid, tickfont: { color: dim, size: 12 * B.scale }, automargin: true };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family, size: 13 * B.scale, color: text }, margin: { l: (narrow ? 44 : 60) * B.scale, r: 12, t: 34 * B.scale, b: 44 * B.scale }, hovermode: "closest",
      hoverlabel: { bgcolor: B.colour("raised"), bordercolor: B.colour("line"), font: { color: text, family } }, dragmode: narrow ? false : "zoom", showlegend: true, ...structuredClone(figure.layout),
    };
    if (layout.height) layout.height *= B.scale;
    for (const key of ["xaxis", "yaxis"]) {
      const own = layout[key] || {};
      layout[key] = { ...base, ...own, title: own.title ? { ...own.title, font: { color: dim, size: 12.5 * B.scale }, standoff: 8 } : undefined };
    }
    layout.legend = { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { color: text, size: (narrow ? 11 : 12.5) * B.scale }, itemwidth: 30, bgcolor: "rgba(0,0,0,0)", traceorder: "normal", ...layout.legend };
    for (const shape of layout.shapes || []) shape.line.color = dim;
    for (const note of layout.annotations || []) note.font = { color: dim, size: 12 * B.scale };
    return layout;
  };

  const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };
  const draw = (box) => {
    const figure = B.meta.figures[box.id];
    const width = B.paper ? (box.closest(".columns") ? B.paper / 2 - 10 : B.paper) : null, layout = layoutOf(figure, (width ?? box.clientWidth) < 560);
    Plotly.react(box, figure.data.map(dressed), width ? { ...layout, width, autosize: false } : { ...layout, autosize: true }, CONFIG);
    if (drawn.has(box)) return;
    drawn.add(box);
    // A point that stands for a round leads to it.
    box.on("plotly_click", ({ points }) => {
      const data = points[0].customdata;
      B.onPoint?.(data);
      if (Array.isArray(data) && data[0] === "round") { const run = B.runs[data[1]]; B.open(run, run.placeOfRound(data[2])); }
    });
  };

  const rowsOf = (figure) => {
    const head = ["series", figure.layout.xaxis?.title?.text || "x", figure.layout.yaxis?.title?.text || "y"];
    return [head, figure.data.flatMap((trace) => trace.x.map((x, i) => [trace.name, x, trace.y[i]]))];
  };

  B.startFigures = () => {
    const boxes = B.$$(".plot");
    const near = new IntersectionObserver((entries) => entries.forEach((entry) => {
      if (entry.isIntersecting) { near.unobserve(entry.target); draw(entry.target); }
    }), { rootMargin: "600px" });
    boxes.forEach((box) => {
      box.style.minHeight = `${(B.meta.figures[box.id].layout.height || 300) * B.scale}px`;
      near.observe(box);
    });
    B.redrawFigures = () => drawn.forEach(draw);
    B.onRedraw(B.redrawFigures);
    addEventListener("beforeprint", () => boxes.forEach(draw));
    B.$$("details.data").forEach((details) => details.addEventListener("toggle", () => {
      if (!details.open || B.$("table", details)) return;
      const [head, rows] = rowsOf(B.meta.figures[details.dataset.figure]);
      details.append(B.table(head, rows.slice(0, TABLE_ROWS)));
      if (rows.length > TABLE_ROWS) details.append(B.el("p", { class: "note" }, `The first ${B.int(TABLE_ROWS)} of ${B.int(rows.length)} rows.`));
    }));
  };
})(globalThis.benchctl);
