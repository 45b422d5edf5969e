"""ServeGen client data: rates and length distributions of one client, from which requests are drawn by seed. Not a trace itself.

`chunk-N-trace.csv` has no header: start of a window (s), requests/s, CV, Gamma | Weibull | blank, two parameters. `chunk-N-dataset.json` has, for
windows of 21,600 s, the probabilities of input and output lengths as texts of Python dictionaries; it is given with --with, or found beside the
CSV. Source: alibaba/ServeGen, data and README.
"""

from __future__ import annotations

import ast
import bisect
import random
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from traces.draws import draw_exponential, draw_gamma, draw_weibull
from traces.errors import BenchctlError
from traces.formats.base import CsvReader, Draft, Format, ImportOptions, Sample
from traces.rows import Row, RowFault

WINDOW_S = 600.0
MAX_REQUESTS_A_WINDOW = 5_000_000
Lengths = tuple[list[int], list[float]]  # values, cumulative probabilities


class ServeGenClientReader(CsvReader):
    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self._windows = read_lengths(_dataset_of(sample.path, options))
        self._starts = sorted(self._windows)
        self._clock = 0.0  # s, of the next request
        self._gaps = random.Random(f"{options.seed} arrivals")
        self._inputs = random.Random(f"{options.seed} inputs")
        self._outputs = random.Random(f"{options.seed} outputs")
        self._end = options.duration_s
        self.origin = "zero"
        name = sample.path.name.removesuffix(".csv").removesuffix("-trace")
        self._tenant = name
        self.assumed.append(
            f"every request is drawn, seed {options.seed}: gaps from each 600-s window's rate and distribution, lengths from its 6-hour window's "
            "probabilities, inputs and outputs independently"
        )

    def read(self, record: list[str], number: int) -> Iterable[Draft]:
        try:
            start, rate = float(record[0]), float(record[1])
            shape = float(record[4]) if rate and record[3].strip() else 1.0
        except ValueError:
            raise RowFault(
                f"no window of a client: {','.join(record)[:60]}", fix="mend the line, or --skip-bad"
            ) from None
        kind = record[3].strip()
        if kind not in ("Gamma", "Weibull", ""):
            raise RowFault(f"the distribution is {kind!r}", fix="Gamma, Weibull or blank")
        if not 0 <= rate < MAX_REQUESTS_A_WINDOW / WINDOW_S or not 0 < shape < 1e6:
            raise RowFault(f"a rate of {rate:g}/s with shape {shape:g}", fix="mend the line, or --skip-bad")
        if self._end is not None and start >= self._end or rate == 0:
            return ()
        return self._window(start, rate, kind, shape, number)

    def _window(self, start: float, rate: float, kind: str, shape: float, number: int) -> Iterable[Draft]:
        place = bisect.bisect_right(self._starts, start) - 1
        lengths = self._windows.get(self._starts[place]) if place >= 0 else None
        if lengths is None:
            self.counts["windows without lengths: no requests there"] += 1
            return
        end = start + WINDOW_S if self._end is None else min(start + WINDOW_S, self._end)
        clock = max(self._clock, start)
        while True:
            if kind == "Weibull":
                gap = draw_weibull(self._gaps, shape)
            else:
                gap = draw_gamma(self._gaps, shape) if kind else draw_exponential(self._gaps, 1.0)
            clock += gap / rate
            if clock >= end:
                break
            row = Row(
                input_length=_draw(self._inputs, lengths[0]),
                output_length=_draw(self._outputs, lengths[1]),
                tenant=self._tenant,
                src={"row": number},
            )
            yield Draft(row, round(clock * 1e9))
        self._clock = clock


def _draw(rng: random.Random, lengths: Lengths) -> int:
    values, upto = lengths
    return values[min(bisect.bisect_right(upto, rng.random() * upto[-1]), len(values) - 1)]


def _dataset_of(path: Path, options: ImportOptions) -> Path:
    if options.side_files:
        return options.side_files[0]
    beside = path.with_name(path.name.replace("-trace.csv", "-dataset.json"))
    if beside == path or not beside.exists():
        raise BenchctlError(
            "ServeGen client data needs its lengths",
            where=str(path),
            fix="--with chunk-N-dataset.json of the same client",
        )
    return beside


def read_lengths(path: Path) -> dict[float, tuple[Lengths, Lengths]]:
    """Window start, s → (inputs, outputs); windows with "{}" are left out. Raises BenchctlError."""
    out: dict[float, tuple[Lengths, Lengths]] = {}
    try:
        windows: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        for start, entry in windows.items():
            sides = [_distribution(entry[key]) for key in ("input_tokens", "output_tokens")]
            if sides[0] and sides[1]:
                out[float(start)] = (sides[0], sides[1])
    except OSError as error:
        raise BenchctlError(f"cannot read {path}: {error.strerror}", where="--with", fix="check the path") from None
    except (ValueError, TypeError, KeyError, AttributeError, SyntaxError, MemoryError, RecursionError) as error:
        raise BenchctlError(
            f"no length distributions: {error!r:.80}", where=str(path), fix="give ServeGen's chunk-N-dataset.json"
        ) from None
    return out


def _distribution(text: str) -> Lengths | None:
    # A Python dictionary as text; literal_eval runs nothing.
    pairs = sorted((int(length), float(p)) for length, p in ast.literal_eval(text).items() if int(length) > 0)
    if not pairs:
        return None
    return [length for length, _ in pairs], list(accumulate(p for _, p in pairs))


def tell(sample: Sample) -> bool:
    return (
        sample.kind == "csv"
        and len(sample.columns) == 6
        and sample.columns[3] in ("Gamma", "Weibull", "")
        and _number(sample.columns[0])
    )


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


FORMAT = Format(
    "servegen-clients",
    "ServeGen client data (CSV with its dataset.json): requests are drawn",
    tell,
    ServeGenClientReader,
)
