"use strict";
// What all pictures of the page share: theme, colours, the window of rounds or seconds in view, the cursor, number formats.
((B) => {
  const root = document.documentElement;
  B.$ = (selector, within = document) => within.querySelector(selector);
  B.$$ = (selector, within = document) => [...within.querySelectorAll(selector)];

  // Elements from (tag, attributes, children); texts become text nodes, so nothing from a trace is read as markup.
  B.el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") node.className = value || "";
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
    return node;
  };

  const PAPER = 690; // pixels of text width, of A4 and of Letter
  B.paper = null;
  // Large screens have larger type (style.css); what is drawn by pixels grows with it.
  B.scale = parseFloat(getComputedStyle(root).fontSize) / 16 || 1;

  // -- numbers
  B.int = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
  B.num = (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    const digits = size >= 1000 || value === 0 ? 0 : size >= 100 ? 1 : size >= 0.1 ? 2 : 4;
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  };
  B.hostMs = (seconds) => (seconds === null || seconds === undefined ? "–" : `${B.num(seconds * 1000)} ms`);
  // FLOPs and bytes in the prefix that leaves a number one can read.
  const scaled = (value, unit, prefixes) => { const [size, prefix] = prefixes.find(([size]) => value >= size) || prefixes.at(-1); return `${B.num(value / size)} ${prefix}${unit}`; };
  B.flops = (value) => scaled(value, "FLOP", [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]]);
  B.bytes = (value) => scaled(value, "B", [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]);
  B.plural = (count, noun) => `${B.int(count)} ${noun}${count === 1 ? "" : "s"}`;
  // Of the run's clock. One that counts rounds (B.logical) measures nothing: there a second is a round.
  B.logical = false;
  B.ms = (seconds) => (B.logical && seconds !== null && seconds !== undefined ? B.plural(+seconds.toFixed(6), "round") : B.hostMs(seconds));
  B.latency = (seconds) => (seconds === null ? null : +(seconds * (B.logical ? 1 : 1000)).toFixed(3));
  B.moment = (seconds) => (B.logical ? `tick ${B.seconds(seconds)}` : `${B.seconds(seconds)} s`);
  B.stretch = (from, to) => (B.logical ? `ticks ${B.seconds(from)}–${B.seconds(to)}` : `${B.seconds(from)}–${B.seconds(to)} s`);
  B.seconds = (value) => value.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: value < 10 ? 4 : 3 });

  // -- theme: auto follows the system
  const media = matchMedia("(prefers-color-scheme: dark)");
  const store = {
    get: () => { try { return localStorage.getItem("benchctl-theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("benchctl-theme", value); } catch { /* a file may have no storage */ } },
  };
  const wish = new URLSearchParams(location.search).get("theme");
  let choice = ["light", "dark"].includes(wish) ? wish : store.get() || "auto";
  const redraws = [];
  B.onRedraw = (draw) => redraws.push(draw);
  let palette = new Map();
  B.colour = (name) => {
    if (!palette.has(name)) palette.set(name, getComputedStyle(root).getPropertyValue(`--${name}`).trim());
    return palette.get(name);
  };
  const applyTheme = (forced) => {
    root.dataset.theme = forced || (choice === "auto" ? (media.matches ? "dark" : "light") : choice);
    palette = new Map();
    const button = B.$("#theme");
    if (button) {
      button.textContent = choice[0].toUpperCase() + choice.slice(1);
      button.setAttribute("aria-label", `Colour theme: ${choice}`);
    }
    redraws.forEach((draw) => draw());
  };
  B.startTheme = () => {
    applyTheme();
    media.addEventListener("change", () => applyTheme());
    B.$("#theme").addEventListener("click", () => {
      choice = { auto: "light", light: "dark", dark: "auto" }[choice];
      store.set(choice);
      applyTheme();
    });
    // On paper pictures are drawn anew, for its width rather than the window's.
    addEventListener("beforeprint", () => { B.paper = PAPER; applyTheme("light"); B.paintAll(); });
    addEventListener("afterprint", () => { B.paper = null; applyTheme(); });
  };

  // -- the window in view: rounds or seconds, the same for every run
  const view = { axis: "round", lo: 0, hi: 1, whole: { round: [0, 1], time: [0, 1] }, cursor: null };
  B.view = view;
  const listeners = { window: [], cursor: [], round: [], open: [] };
  B.on = (what, listener) => listeners[what].push(listener);
  const tell = (what, ...values) => listeners[what].forEach((listener) => listener(...values));

  // One frame for all that happens before it.
  let waiting = false;
  const later = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; tell("window"); });
  };
  B.setWindow = (lo, hi) => {
    const [from, to] = view.whole[view.axis], least = view.axis === "round" ? 4 : (to - from) / 1e6 || 1e-6;
    let width = Math.min(Math.max(hi - lo, least), to - from);
    lo = Math.max(from, Math.min(lo, to - width));
    view.lo = lo;
    view.hi = lo + width;
    later();
  };
  B.resetWindow = () => B.setWindow(...view.whole[view.axis]);
  // Changing the axis keeps the rounds of the first run in view.
  B.setAxis = (axis) => {
    if (axis === view.axis) return;
    const run = B.runs[0], whole = view.lo <= view.whole[view.axis][0] && view.hi >= view.whole[view.axis][1];
    const first = B.indexAt(run, view.lo), last = B.indexAt(run, view.hi);
    view.axis = axis;
    B.setCursor(null);
    if (whole || !run.n) B.resetWindow();
    else B.setWindow(B.left(run, first), B.right(run, last));
  };
  B.setCursor = (at) => { view.cursor = at; tell("cursor", at); };

  // Where round i begins and ends on the axis.
  B.left = (run, i) => (view.axis === "round" ? run.round[i] - 0.5 : run.begin[i]);
  B.right = (run, i) => (view.axis === "round" ? run.round[i] + 0.5 : run.end[i]);
  B.indexAt = (run, at) => (view.axis === "round" ? run.placeOfRound(Math.round(at)) : run.placeOfTime(at));
  // A moment on the axis: by rounds, in proportion inside its round.
  B.atTime = (run, t) => {
    if (view.axis === "time" || !run.n) return t;
    const i = run.placeOfTime(t);
    if (t >= run.end[i]) return run.round[i] + 0.5;
    const from = i ? run.end[i - 1] : 0, begin = i ? run.round[i - 1] + 0.5 : Math.min(0.5, run.round[0] - 0.5);
    return begin + ((t - from) / Math.max(run.end[i] - from, 1e-12)) * (run.round[i] + 0.5 - begin);
  };

  // The part in view, in seconds of a run.
  B.windowTimes = (run) => {
    if (view.axis === "time" || !run.n) return [view.lo, view.hi];
    const [from, to] = view.whole.round;
    return [view.lo <= from ? 0 : run.begin[B.indexAt(run, Math.ceil(view.lo))], view.hi >= to ? Infinity : run.end[B.indexAt(run, Math.floor(view.hi))]];
  };

  // -- the chosen round
  B.chosen = { run: null, i: 0 };
  B.choose = (run, i, how = {}) => {
    if (!run.n) return;
    B.chosen = { run, i: Math.max(0, Math.min(i, run.n - 1)) };
    B.setCursor((B.left(run, B.chosen.i) + B.right(run, B.chosen.i)) / 2);
    tell("round", run, B.chosen.i, how);
  };
  B.show = (run, i) => {
    B.choose(run, i, { scroll: true });
    const at = view.cursor, width = view.hi - view.lo;
    if (at < view.lo || at > view.hi) B.setWindow(at - width / 2, at + width / 2);
  };
  // Chosen by a link from elsewhere: the list and the round in full come into view.
  B.open = (run, i) => { B.show(run, i); tell("open", run, B.chosen.i); };
  B.roundLink = (run, i) => B.el("button", { type: "button", class: "link", onclick: () => B.open(run, i) }, B.int(run.round[i]));

  // -- axes
  B.ticks = (lo, hi, wanted) => {
    const raw = (hi - lo) / Math.max(wanted, 1);
    if (!(raw > 0)) return [lo];
    const base = 10 ** Math.floor(Math.log10(raw)), step = base * [1, 2, 5, 10].find((k) => k * base >= raw * 0.999);
    const out = [];
    for (let k = Math.ceil(lo / step - 1e-9); k * step <= hi + step * 1e-9; k++) out.push(+(k * step).toPrecision(12));
    return out;
  };
  B.short = (value) => (Math.abs(value) >= 1e6 ? `${+(value / 1e6).toPrecision(3)}M` : Math.abs(value) >= 1e4 ? `${+(value / 1e3).toPrecision(3)}k` : (+value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 6 }));
})(globalThis.benchctl);
