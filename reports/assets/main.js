"use strict";
// Opens the embedded runs and starts every part of the page. `benchctl.ready` resolves when the pictures stand.
((B) => {
  B.meta = JSON.parse(B.$("#figures").textContent);
  B.startTheme();
  const fail = (error) => {
    console.error(error);
    const box = B.$("#trouble");
    box.hidden = false;
    box.textContent = `The pictures of this page could not be drawn: ${error.message}. A browser of 2023 or later is needed.`;
  };
  const plotly = async () => {
    const code = new TextDecoder().decode(await B.inflate(B.$("#plotly").textContent.trim()));
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
  };
  const start = async () => {
    B.runs = await Promise.all(B.$$("script.run-data").map((element, place) => B.load(element, place)));
    B.logical = B.runs.every((run) => run.facts.clock === "rounds");
    const most = (of) => Math.max(...B.runs.map(of));
    B.view.whole = { round: [0.5, most((run) => (run.n ? run.round[run.n - 1] : 1)) + 0.5], time: [0, most((run) => run.facts.duration_s) || 1] };
    B.view.axis = B.$('input[name="axis"]:checked')?.value || "round";
    // The next frame; a tab in the background has none, and does not wait for it.
    const frame = () => new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); setTimeout(done, 300); });
    const drawn = B.$("#rounds");
    if (drawn) B.startRounds();
    B.resetWindow();
    await frame();
    await frame();
    performance.mark("first-figure");
    // What stands further down follows, a frame after each other.
    for (const part of drawn ? [B.startWhy, B.startRequests, B.startBlocks] : []) {
      part();
      await frame();
    }
    if (drawn) B.choose(B.runs[0], 0);
    B.$$("[data-goto]").forEach((link) => link.addEventListener("click", () => {
      const [place, round] = link.dataset.goto.split(":").map(Number), run = B.runs[place];
      B.open(run, run.placeOfRound(round));
    }));
    B.$$("[data-request]").forEach((link) => link.addEventListener("click", () => {
      const [place, request] = link.dataset.request.split(":").map(Number), run = B.runs[place];
      B.showRequest(run, run.rowOf.get(request));
    }));
    await plotly();
    B.startFigures();
  };
  // The page counts as loaded once its pictures stand: what prints or photographs it on load (--print-to-pdf) waits for them.
  // An empty frame that is still being written holds the load event up, without any request.
  const holder = B.el("iframe", { hidden: true, title: "" });
  document.body.append(holder);
  try { holder.contentDocument.open(); } catch { /* then only those who wait see the pictures */ }
  B.ready = start().catch(fail).finally(() => { try { holder.contentDocument.close(); } catch { /* never opened */ } holder.remove(); });
})(globalThis.benchctl);
