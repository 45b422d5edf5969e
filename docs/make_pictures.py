"""Makes the pictures of the documentation anew, from runs that it makes itself: `python docs/make_pictures.py [--device RUN…]`.

Needs Chromium. `--device` names run folders made on a card (one trace), for the picture of the roofline. With Pillow
installed the files are packed closer.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from reports.page import write_report  # noqa: E402
from tests.browser import Browser, Tab  # noqa: E402

IMAGES = ROOT / "docs" / "images"
LESSONS = ROOT / "traces" / "lessons"


def main(argv: list[str]) -> None:
    device = argv[1:] if argv[:1] == ["--device"] else []
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        browser = Browser(here / "profile")
        try:
            page = replay(here / "sharegpt", ROOT / "traces" / "sharegpt.jsonl")
            with browser.page(page, width=1240, query="?theme=light") as tab:
                picture(tab, "report-head", ["section.head .kicker", "section.head .answers"])
                tab.evaluate("benchctl.setWindow(18.2, 22.4)")
                tab.evaluate("benchctl.show(benchctl.runs[0], benchctl.runs[0].placeOfRound(3530))")
                picture(tab, "report-rounds", ["#rounds h3", ".lanes[data-run='1']"])
                picture(tab, "report-why", [".inspector"])
                tab.evaluate("benchctl.setWindow(18.2, 22.4)")
                picture(tab, "report-blocks", [".mapbox"])
                picture(tab, "report-requests", [".gantt[data-run='0']"])
            with browser.page(page, width=1240, query="?theme=dark") as tab:
                tab.evaluate("benchctl.setWindow(18.2, 22.4)")
                tab.evaluate("benchctl.show(benchctl.runs[0], benchctl.runs[0].placeOfRound(3530))")
                picture(tab, "report-rounds-dark", ["#rounds h3", ".lanes[data-run='1']"])
            if device:
                made = write_report(device, here / "device.html")
                with browser.page(made, width=1240, query="?theme=light") as tab:
                    tab.evaluate("document.querySelector('#device').scrollIntoView()")
                    tab.wait("document.querySelector('#roofline .main-svg')")
                    picture(tab, "report-device", ["#device"])
            for trace in sorted(LESSONS.glob("*.jsonl")):
                clock = "virtual" if trace.name.startswith("15-") else "rounds"
                made = replay(here / trace.stem, trace, "--clock", clock)
                with browser.page(made, width=1000, query="?theme=light") as tab:
                    picture(
                        tab,
                        f"lessons/{trace.stem}",
                        ["#rounds h3", ".lanes[data-run='1']"],
                        hide=".readout, .cursor, [id^=lanes-note], .lane-data, [data-lane=Time]",
                    )
        finally:
            browser.close()


def replay(out: Path, trace: Path, *more: str) -> Path:
    """Both policies on the trace, on the null engine; returns the page."""
    from benchctl.cli import app

    argv = [
        "replay",
        str(trace),
        "--scheduler",
        "nano",
        "--scheduler",
        "vllm",
        "--engine",
        "null",
        "--out",
        str(out),
        *more,
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = app(argv, standalone_mode=False)
    page = out / "report.html"
    if not page.exists():
        raise SystemExit(f"exit code {code}: benchctl {' '.join(argv)}\n{said.getvalue()}")
    return page


def picture(tab: Tab, name: str, between: list[str], hide: str = "") -> None:
    """A picture from the top of the first element to the end of the last,."""
    style = ".top, .bar-tools { display: none !important; } .lane-data, [id^=lanes-note] { display: none; }" + (
        f" {hide} {{ display: none !important; }}" if hide else ""
    )
    tab.evaluate(
        f"document.head.append(Object.assign(document.createElement('style'), {{ textContent: {json.dumps(style)} }}))"
    )
    first, last = json.dumps(between[0]), json.dumps(between[-1])
    tab.evaluate(f"document.querySelector({last}).scrollIntoView({{ behavior: 'instant' }})")
    tab.settle()
    tab.evaluate("benchctl.paintAll()")
    left, top, right, bottom = tab.evaluate(
        f"(() => {{ const a = document.querySelector({first}).getBoundingClientRect(), b = document.querySelector({last}).getBoundingClientRect();"
        " return [Math.min(a.left, b.left), a.top + scrollY, Math.max(a.right, b.right), b.bottom + scrollY]; })()"
    )
    margin = 14
    clip = {
        "x": left - margin,
        "y": top - margin,
        "width": right - left + 2 * margin,
        "height": bottom - top + 2 * margin,
        "scale": 1,
    }
    data = tab.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
    file = IMAGES / f"{name}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(smaller(base64.b64decode(data)))
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


def smaller(png: bytes) -> bytes:
    try:
        from PIL import Image
    except ImportError:
        return png
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(out, "png", optimize=True)
    return min(png, out.getvalue(), key=len)


if __name__ == "__main__":
    main(sys.argv[1:])
