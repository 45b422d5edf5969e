"use strict";
// A canvas along the shared axis: sized to its box, with margins, ticks, the cursor line, drag to zoom, and keys.
((B) => {
  const view = B.view;
  B.MARGIN = { left: 54 * B.scale, right: 10 };

  const planes = [];
  class Plane {
    // draw(plane) is called whenever the window, the size or the theme changes; `axis`: ticks and their labels below.
    constructor(box, run, height, draw, { axis = false, top = 4 } = {}) {
      Object.assign(this, { box, run, draw, axis, top, width: 0 });
      this.canvas = B.el("canvas", { "aria-hidden": "true" });
      this.line = B.el("div", { class: "cursor", hidden: true });
      this.band = B.el("div", { class: "band", hidden: true });
      box.classList.add("plane");
      box.append(this.canvas, this.band, this.line);
      this.setHeight(height);
      this.near = false;
      new ResizeObserver(() => this.redraw()).observe(box);
      new IntersectionObserver(([entry]) => { this.near = entry.isIntersecting; if (this.near && this.stale) this.redraw(); }, { rootMargin: "700px" }).observe(box);
      B.on("window", () => this.redraw());
      B.on("cursor", (at) => this.moveCursor(at));
      B.onRedraw(() => this.redraw());
      planes.push(this);
      this.listen();
    }
    setHeight(height) { this.height = height; this.canvas.style.height = `${height}px`; }
    get bottom() { return this.height - (this.axis ? 20 * B.scale : 4); }
    x(at) { return B.MARGIN.left + ((at - view.lo) / (view.hi - view.lo)) * this.width; }
    at(x) { return view.lo + ((x - B.MARGIN.left) / this.width) * (view.hi - view.lo); }

    // Soon, once for all that happens before the next frame, and only where somebody looks.
    redraw() {
      this.stale = true;
      if (!this.near || this.queued) return;
      this.queued = true;
      requestAnimationFrame(() => { this.queued = false; this.paint(); });
    }
    paint() {
      this.stale = false;
      const ratio = Math.min(devicePixelRatio || 1, 2), full = B.paper || this.box.clientWidth;
      this.width = full - B.MARGIN.left - B.MARGIN.right; // read once: asking the layout costs more than drawing
      if (this.width <= 0) return;
      this.least = 1 / ratio; // a device pixel
      this.snap = (x) => Math.round(x * ratio) / ratio; // so that neighbours meet without a seam
      this.canvas.width = Math.round(full * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      const g = (this.g = this.canvas.getContext("2d"));
      g.setTransform(ratio, 0, 0, ratio, 0, 0);
      g.clearRect(0, 0, full, this.height);
      g.font = `${11.5 * B.scale}px ${B.colour("sans")}`;
      this.labels = [];
      this.grid();
      g.save();
      g.beginPath();
      g.rect(B.MARGIN.left, 0, this.width, this.bottom + 1);
      g.clip();
      this.draw(this);
      g.restore();
      g.fillStyle = B.colour("dim");
      g.textAlign = "right";
      g.textBaseline = "middle";
      for (const [text, y] of this.labels) g.fillText(text, B.MARGIN.left - 7, Math.max(y, 6));
      this.moveCursor(view.cursor);
    }
    grid() {
      const g = this.g, ticks = B.ticks(view.lo, view.hi, this.width / (110 * B.scale));
      g.strokeStyle = B.colour("grid");
      g.fillStyle = B.colour("dim");
      g.textAlign = "center";
      g.textBaseline = "top";
      for (const tick of ticks) {
        const x = Math.round(this.x(tick)) + 0.5;
        if (view.axis === "round" && tick % 1) continue;
        g.beginPath();
        g.moveTo(x, this.top);
        g.lineTo(x, this.bottom);
        g.stroke();
        if (this.axis) g.fillText(view.axis === "round" ? tick.toLocaleString("en") : `${B.short(tick)}${B.logical ? "" : " s"}`, x, this.bottom + 5);
      }
    }
    // Horizontal lines with labels on the left for values 0 … most.
    scale(most, wanted = 3, unit = "") {
      const g = this.g, y = (value) => this.bottom - (value / most) * (this.bottom - this.top);
      g.strokeStyle = B.colour("grid");
      for (const tick of B.ticks(0, most, wanted)) {
        const at = Math.round(y(tick)) + 0.5;
        g.beginPath();
        g.moveTo(B.MARGIN.left, at);
        g.lineTo(B.MARGIN.left + this.width, at);
        g.stroke();
        this.labels.push([B.short(tick) + unit, at]);
      }
      return y;
    }
    moveCursor(at) {
      const x = at === null ? -1 : this.x(at), inside = x >= B.MARGIN.left - 0.5 && x <= B.MARGIN.left + this.width + 0.5;
      this.line.hidden = !inside;
      if (inside) this.line.style.transform = `translateX(${x}px)`;
    }

    listen() {
      let from = null;
      const place = (event) => event.clientX - this.box.getBoundingClientRect().left;
      const inside = (x) => Math.max(B.MARGIN.left, Math.min(x, B.MARGIN.left + this.width));
      this.box.addEventListener("pointermove", (event) => {
        if (event.pointerType === "touch") return;
        const x = inside(place(event));
        B.setCursor(this.at(x));
        if (this.hover) this.hover(event);
        if (from === null || Math.abs(x - from) < 4) return;
        this.band.hidden = false;
        this.band.style.left = `${Math.min(x, from)}px`;
        this.band.style.width = `${Math.abs(x - from)}px`;
      });
      this.box.addEventListener("pointerdown", (event) => {
        if (event.button || event.pointerType === "touch") return;
        from = inside(place(event));
        this.box.setPointerCapture(event.pointerId);
      });
      this.box.addEventListener("pointerup", (event) => {
        if (from === null) return;
        const x = inside(place(event)), begin = from;
        from = null;
        this.band.hidden = true;
        if (Math.abs(x - begin) >= 4) B.setWindow(this.at(Math.min(x, begin)), this.at(Math.max(x, begin)));
        else this.pick(event, x);
      });
      this.box.addEventListener("click", (event) => {
        if (event.pointerType === "touch") this.pick(event, inside(place(event)));
      });
      this.box.addEventListener("pointerleave", () => {
        if (from === null) B.setCursor(B.chosen.run ? (B.left(B.chosen.run, B.chosen.i) + B.right(B.chosen.run, B.chosen.i)) / 2 : null);
        if (this.leave) this.leave();
      });
      this.box.addEventListener("dblclick", () => B.resetWindow());
    }
    pick(event, x) {
      if (this.click && this.click(event)) return;
      B.choose(this.run, B.indexAt(this.run, this.at(x)));
    }
  }
  B.Plane = Plane;
  B.paintAll = () => planes.forEach((plane) => plane.paint());

  // Keys of whatever holds pictures of one run.
  B.keys = (box, run) => box.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea, button, a")) return;
    const step = event.shiftKey ? 10 : 1, width = view.hi - view.lo, middle = (view.hi + view.lo) / 2;
    const here = B.chosen.run === run ? B.chosen.i : B.indexAt(run, view.cursor ?? view.lo) - 1;
    const acts = {
      ArrowRight: () => B.show(run, here + step), ArrowLeft: () => B.show(run, here - step),
      Home: () => B.show(run, 0), End: () => B.show(run, run.n - 1),
      "+": () => B.setWindow((view.cursor ?? middle) - width / 4, (view.cursor ?? middle) + width / 4), "-": () => B.setWindow(middle - width, middle + width),
      Escape: () => B.resetWindow(),
    };
    acts["="] = acts["+"];
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  });
})(globalThis.benchctl);
