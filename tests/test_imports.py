"""Who may import whom: checked on the sources, and in fresh processes for what must not be loaded."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("benchctl", "engines", "reports", "traces")
# Package -> modules of ours (by prefix) that it may import, itself aside.
ALLOWED = {
    "traces": (),
    "engines": ("traces.request", "traces.errors"),
    "reports": ("traces.request", "traces.errors"),
    "benchctl": ("engines", "reports", "traces"),
}
# Reports explain rounds in the schedulers' own vocabulary only by repeating it.
PURE = ("engines/interface.py", "engines/schedulers", "engines/simulated", "engines/null_engine.py")
IMPURE_MODULES = {"torch", "time", "random", "datetime", "os", "io", "pathlib", "threading", "secrets"}


def sources(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down_only(package: str) -> None:
    for path in sources(package):
        for name in imported(path):
            top = name.partition(".")[0]
            if top in PACKAGES and top != package:
                assert any(name == ok or name.startswith(f"{ok}.") for ok in ALLOWED[package]), f"{path}: {name}"


@pytest.mark.parametrize("place", PURE)
def test_schedulers_know_no_torch_clock_file_or_randomness(place: str) -> None:
    for path in sources(place):
        names = imported(path)
        assert not {name.partition(".")[0] for name in names} & IMPURE_MODULES, path
        assert not any(name.startswith("numpy.random") for name in names), path
        text = path.read_text()
        assert "np.random" not in text and "open(" not in text, path


def test_there_is_no_circle_of_imports() -> None:
    graph: dict[str, set[str]] = {}
    files = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for p in PACKAGES for path in sources(p)}
    modules = {name.removesuffix(".__init__") for name in files.values()}
    for path, name in files.items():
        tree = ast.parse(path.read_text())
        direct = set()
        for node in tree.body:  # what is imported when the module is
            if isinstance(node, ast.Import):
                direct |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                direct |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        graph[name.removesuffix(".__init__")] = {m for m in direct if m in modules}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a circle: {' -> '.join((*above, name))}"
        if name not in done:
            for other in sorted(graph[name] - {name}):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def fresh(code: str) -> set[str]:
    """Top-level modules loaded by `code` in a process of its own."""
    ask = f"{code}\nimport sys\nprint(' '.join(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(out.stdout.splitlines()[-1].split())


def test_schedulers_load_without_torch() -> None:
    loaded = fresh("import engines.interface, engines.schedulers.registry, engines.null_engine")
    assert "torch" not in loaded and "polars" not in loaded


def test_a_null_replay_loads_neither_torch_nor_the_drawing_packages(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"arrival_s": 0, "input_length": 4, "output_length": 2}\n')
    argv = ["replay", str(trace), "--engine", "null", "--no-report", "--out", str(tmp_path / "o")]
    loaded = fresh(f"from benchctl.cli import app; app({argv!r}, standalone_mode=False)")
    assert "polars" in loaded
    assert not loaded & {"torch", "triton", "transformers", "plotly", "jinja2"}


def test_a_report_loads_without_torch(tmp_path: Path) -> None:
    assert "torch" not in fresh("import reports.page, reports.summary, reports.terminal")


def test_help_answers_at_once_without_torch_and_polars() -> None:
    code = (
        "import sys; sys.argv = ['benchctl', '--help']\n"
        "from benchctl.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code"
    )
    loaded = fresh(code)
    assert not loaded & {"torch", "polars", "numpy", "plotly", "transformers"}
    took = []
    for _ in range(3):  # processor time: how long one waits depends on what else the machine does
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "benchctl", "--help"], capture_output=True, check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.5, took
