"""One line of a trace file: decode it, check what can be checked on its own, and write it back in canonical form.

Knows the keys of the canonical format and the dialects that are read as aliases (Mooncake's `timestamp`, aiperf's
`session_id`, `text_input`, `delay`). Must not know files or other rows: what needs a second row is checked in `load`.
Source of the keys: docs/traces.md.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import msgspec

from traces.request import Carry, Request, Segment, Slo

MAX_LENGTH = 2**60  # of a prompt or an output, in tokens: sums of two stay inside int64
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # of milliseconds too: a Unix time still fits
Int64 = Annotated[int, msgspec.Meta(ge=INT64_MIN, le=INT64_MAX)]
Name = Annotated[str, msgspec.Meta(min_length=1)]

# What each key must be, as the cure of a fault names it.
RULES: dict[str, str] = {
    "id": "a text that no other row has",
    "arrival_s": "a number >= 0: seconds from the trace's start",
    "timestamp": "a number >= 0: milliseconds from the trace's start (arrival_s is the same in seconds)",
    "arrival_round": "an integer >= 1: the round that first sees the request, for --clock rounds",
    "session": "a text: the conversation",
    "session_id": "a text or an integer: the conversation",
    "turn": "an integer >= 1",
    "parents": "a list of ids of earlier rows",
    "think_s": "a number >= 0: seconds after the last parent finished",
    "delay": "a number >= 0: milliseconds after the last parent finished (think_s is the same in seconds)",
    "prompt_token_ids": "a list of at least one 64-bit integer",
    "prompt": "a text of at least one character",
    "text_input": "a text of at least one character",
    "messages": "a list of at least one message object",
    "tools": "a list, beside messages",
    "input_length": f"an integer from 1 to {MAX_LENGTH}: tokens of the prompt",
    "hash_ids": "a list of 64-bit integers or texts, one for each block of the prompt, beside input_length",
    "segments": '[{"id": text or integer, "len": tokens}, ...], at most input_length tokens together',
    "carry": '{"from": id of an earlier row, "tokens": integer >= 1}, beside input_length',
    "output_length": f"an integer from 1 to {MAX_LENGTH}: tokens to generate",
    "output_token_ids": "a list of at least one 64-bit integer",
    "max_tokens": f"an integer from 1 to {MAX_LENGTH}: a cap on the output",
    "stop": '"eos", or leave it out: then the output length is forced',
    "priority": "a 64-bit integer, lower is more urgent",
    "slo": '{"ttft_ms": number > 0, "tpot_ms": number > 0, "e2e_ms": number > 0, "class": text}, all optional',
    "model": "a text",
    "adapter": "a text",
    "tenant": "a text",
    "media": "a list",
    "sampling": "an object",
    "observed": "an object",
    "src": "an object",
}

OTHER_FORMATS = "files of other formats: benchctl trace import, or --format auto or --map on replay"

INTEGER_KEYS = ("arrival_round", "turn", "input_length", "output_length", "max_tokens", "priority")
INTEGER_LIST_KEYS = ("prompt_token_ids", "hash_ids", "output_token_ids")
PROMPT_KEYS = ("prompt_token_ids", "prompt", "messages", "input_length")
SHAPE_KEYS = ("hash_ids", "segments", "carry")


class Row(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A line as it stands, mutable until `normalize` has emptied the alias keys at the end. Null is as good as absent."""

    id: Name | None = None
    arrival_s: Seconds | None = None
    arrival_round: Annotated[int, msgspec.Meta(ge=1, le=2**53)] | None = None
    session: str | None = None
    turn: Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)] | None = None
    parents: tuple[str, ...] | None = None
    think_s: Seconds | None = None
    prompt_token_ids: tuple[Int64, ...] | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    input_length: Length | None = None
    hash_ids: tuple[Int64 | str, ...] | None = None
    segments: tuple[Segment, ...] | None = None
    carry: Carry | None = None
    output_length: Length | None = None
    output_token_ids: tuple[Int64, ...] | None = None
    max_tokens: Length | None = None
    stop: Literal["eos"] | None = None
    priority: Int64 | None = None
    slo: Slo | None = None
    model: str | None = None
    adapter: str | None = None
    tenant: str | None = None
    media: list[Any] | None = None
    sampling: dict[str, Any] | None = None
    observed: dict[str, Any] | None = None
    src: dict[str, Any] | None = None
    # Aliases, read and never written.
    timestamp: Seconds | None = None
    session_id: str | int | None = None
    delay: Seconds | None = None
    text_input: str | None = None


class RowFault(Exception):
    """What is wrong with one row. The reader of the file adds file and line and makes it a BenchctlError."""

    def __init__(self, what: str, *, key: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.key = key
        self.fix = fix if fix is not None or key is None else f"`{key}` must be {RULES[key]}"


class BlockCountFault(RowFault):
    """`hash_ids` and `input_length` disagree: kept apart, since a whole file of these means another block size."""

    def __init__(self, num_ids: int, input_length: int, block_size: int) -> None:
        self.num_ids = num_ids
        self.input_length = input_length
        needed = -(-input_length // block_size)
        super().__init__(
            f"{num_ids} hash_ids for {input_length} tokens; blocks of {block_size} need {needed}",
            key="hash_ids",
            fix=f"give {needed} hash_ids, or mend input_length",
        )


_encoder = msgspec.json.Encoder(order="deterministic")
_exact = msgspec.json.Decoder(Row)
_FIELDS = frozenset(Row.__struct_fields__)


class RowDecoder:
    """Bytes to rows. Exact and fast where it can; a file with unknown keys is read the slow way from its first one on.

    `unknown` counts the keys that no rule knows: rows that have them, by key; with `strict` they are a fault. `lenient`:
    the file is known to have some.
    """

    def __init__(self, *, strict: bool = False, lenient: bool = False) -> None:
        self.unknown: dict[str, int] = {}
        self._strict = strict
        self._lenient = lenient

    def decode(self, line: bytes, *, complete: bool = True) -> Row:
        """`complete`: the line ended in a line end. Raises RowFault."""
        exact_error: msgspec.ValidationError | None = None
        try:
            if not self._lenient:
                try:
                    return _exact.decode(line)
                except msgspec.ValidationError as error:
                    exact_error = error  # wrong, or merely an unknown key or 3.0 for 3: the slow way tells
            return self._decode_slowly(line)
        except msgspec.ValidationError as error:
            # Untyped reading, the slow way's first step, cannot say where a number is out of range.
            at = _PATH.search(str(error))
            pathless = at is None or at["path"][:1] in ("", "[")
            raise _type_fault(exact_error if exact_error is not None and pathless else error, line) from None
        except msgspec.DecodeError as error:
            raise _syntax_fault(error, line, complete) from None
        except RecursionError:
            raise RowFault("nested too deeply", fix="a row is one flat object") from None

    def _decode_slowly(self, line: bytes) -> Row:
        raw = msgspec.json.decode(line)
        if not isinstance(raw, dict):
            raise RowFault(f"a row must be one JSON object, not {_describe(raw)}", fix="write one object on each line")
        if "benchctl_trace" in raw:
            raise RowFault("a header below the first line", fix="move the header to the first line, or remove it")
        extra = {key: raw.pop(key) for key in [k for k in raw if k not in _FIELDS]}
        for key in INTEGER_KEYS:
            if type(raw.get(key)) is float:
                raw[key] = _as_integer(raw[key])
        for key in INTEGER_LIST_KEYS:
            if isinstance(raw.get(key), list):
                raw[key] = [_as_integer(v) if type(v) is float else v for v in raw[key]]
        for part in [raw.get("carry"), *(raw["segments"] if isinstance(raw.get("segments"), list) else [])]:
            if isinstance(part, dict):
                for key in ("tokens", "len", "id"):
                    if type(part.get(key)) is float:
                        part[key] = _as_integer(part[key])
        if extra and self._strict:
            key = next(iter(extra))
            raise RowFault(f"unknown key `{key}`", fix="remove it, put it into src, or leave out --strict")
        row = msgspec.convert(raw, Row)
        if extra:
            self._lenient = True
            for key in extra:
                self.unknown[key] = self.unknown.get(key, 0) + 1
            # A key of the row's own `src` came from the source itself and is not overwritten.
            row.src = {**extra, **(row.src or {})}
        return row


def normalize(row: Row) -> None:
    """Aliases become canonical keys, units become seconds, empty lists that say nothing become absent. Raises RowFault."""
    if row.timestamp is not None:
        if row.arrival_s is not None:
            raise RowFault("both arrival_s and timestamp", key="timestamp", fix="keep one of the two")
        row.arrival_s, row.timestamp = row.timestamp / 1000, None
    if row.delay is not None:
        if row.think_s is not None:
            raise RowFault("both think_s and delay", key="delay", fix="keep one of the two")
        row.think_s, row.delay = row.delay / 1000, None
    if row.session_id is not None:
        if row.session is not None:
            raise RowFault("both session and session_id", key="session_id", fix="keep one of the two")
        row.session, row.session_id = str(row.session_id), None
    if row.text_input is not None:
        if row.prompt is not None:
            raise RowFault("two prompts: prompt and text_input", key="text_input", fix="keep one of the two")
        row.prompt, row.text_input = row.text_input, None
    if row.arrival_s == 0:
        row.arrival_s = 0.0  # -0.0 is the same moment
    if row.priority == 0:
        row.priority = None
    if row.parents is not None and not row.parents:
        row.parents = None
    if row.hash_ids is not None and not row.hash_ids:
        row.hash_ids = None
    if row.segments is not None and not row.segments:
        row.segments = None


def check(row: Row, block_size: int) -> None:
    """Everything that a row must hold by itself; `normalize` first. Raises RowFault."""
    kinds = [key for key in PROMPT_KEYS if getattr(row, key) is not None]
    if len(kinds) != 1:
        unknown = f" (unknown keys: {', '.join(list(row.src)[:8])})" if row.src else ""
        what = f"{len(kinds)} prompts: {', '.join(kinds)}" if kinds else f"no prompt{unknown}"
        cure = "give exactly one of prompt_token_ids, prompt, messages, input_length"
        raise RowFault(what, fix=cure if kinds or not row.src else f"{cure}; {OTHER_FORMATS}")
    kind = kinds[0]
    if kind != "input_length":
        if not getattr(row, kind):
            raise RowFault(f"an empty {kind}", key=kind)
        for key in SHAPE_KEYS:
            if getattr(row, key) is not None:
                raise RowFault(f"{key} beside {kind}", key=key, fix=f"{key} goes with input_length only: keep one")
    else:
        _check_shape(row, block_size)
    if row.tools is not None and kind != "messages":
        raise RowFault(f"tools beside {kind}", key="tools", fix="tools go with messages only")
    _check_output(row)
    if row.slo is not None:
        for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
            target = getattr(row.slo, key)
            if target is not None and not target > 0:
                raise RowFault(f"slo.{key} is {target}", key="slo")


def _check_shape(row: Row, block_size: int) -> None:
    length = row.input_length
    assert length is not None
    if row.hash_ids is None and row.segments is None and row.carry is None:
        return
    shapes = [key for key in SHAPE_KEYS if getattr(row, key) is not None]
    if len(shapes) > 1:
        raise RowFault(f"{' and '.join(shapes)} in one row", key=shapes[1], fix="keep one of hash_ids, segments, carry")
    if row.hash_ids is not None:
        if len(row.hash_ids) != -(-length // block_size):
            raise BlockCountFault(len(row.hash_ids), length, block_size)
    elif row.segments is not None:
        for segment in row.segments:
            if segment.len < 1:
                raise RowFault(f"a segment of {segment.len} tokens", key="segments")
            if isinstance(segment.id, int) and not INT64_MIN <= segment.id <= INT64_MAX:
                raise RowFault(f"segment id {segment.id} is outside 64 bits", key="segments")
        total = sum(segment.len for segment in row.segments)
        if total > length:
            raise RowFault(f"segments of {total} tokens in a prompt of {length}", key="segments")
    elif row.carry is not None:
        if row.carry.tokens < 1:
            raise RowFault(f"carry of {row.carry.tokens} tokens", key="carry")
        if row.carry.tokens > length:
            raise RowFault(f"carry of {row.carry.tokens} tokens in a prompt of {length}", key="carry")


def _check_output(row: Row) -> None:
    if row.output_token_ids is not None:
        if not row.output_token_ids:
            raise RowFault("no output_token_ids in the list", key="output_token_ids")
        if row.output_length is not None and row.output_length != len(row.output_token_ids):
            raise RowFault(
                f"output_length {row.output_length}, but {len(row.output_token_ids)} output_token_ids",
                key="output_length",
                fix="leave output_length out, or make the two agree",
            )
    elif row.output_length is None and row.max_tokens is None:
        raise RowFault("no output length", fix="give output_length (or output_token_ids, or max_tokens)")


def resolved_output_length(row: Row) -> int:
    """Tokens the request will generate: its output ids or its target, at most `max_tokens`; `check` first."""
    target = len(row.output_token_ids) if row.output_token_ids is not None else row.output_length
    if target is None:
        assert row.max_tokens is not None, row
        return row.max_tokens
    return target if row.max_tokens is None else min(target, row.max_tokens)


def prompt_tokens(row: Row) -> int | None:
    """Tokens of the prompt; None for text, whose length only a tokenizer knows."""
    return len(row.prompt_token_ids) if row.prompt_token_ids is not None else row.input_length


def canonical_line(row: Row) -> bytes:
    """The row as the canonical form has it: known keys in their order, no defaults, no aliases, no line end."""
    return _encoder.encode(row)


def to_request(row: Row, *, index: int, line: int, parents: tuple[str, ...]) -> Request:
    """A checked row as the rest of the project sees it."""
    return Request(
        index=index,
        line=line,
        id=row.id or f"r{line}",
        arrival_s=row.arrival_s,
        arrival_round=row.arrival_round,
        session=row.session,
        turn=row.turn,
        parents=parents,
        think_s=row.think_s,
        prompt_token_ids=row.prompt_token_ids,
        prompt=row.prompt,
        messages=row.messages,
        tools=row.tools,
        input_length=row.input_length,
        hash_ids=row.hash_ids,
        segments=row.segments,
        carry=row.carry,
        output_length=resolved_output_length(row),
        output_token_ids=row.output_token_ids,
        max_tokens=row.max_tokens,
        stop=row.stop,
        priority=row.priority or 0,
        slo=row.slo,
        model=row.model,
        adapter=row.adapter,
        tenant=row.tenant,
        media=row.media,
        sampling=row.sampling,
        observed=row.observed,
        src=row.src,
    )


def from_request(request: Request) -> Row:
    """The row that `to_request` makes `request` of again, at the same place of a file. Its id is always written."""
    kept = {key: getattr(request, key) for key in Row.__struct_fields__ if key in Request.__struct_fields__}
    kept["parents"] = request.parents or None
    kept["priority"] = request.priority or None
    if request.output_token_ids is not None:
        kept["output_length"] = None  # it was resolved from the ids
    return Row(**kept)


def _as_integer(value: float) -> int | float:
    return int(value) if value.is_integer() else value


_EXPECTED = re.compile(
    r"^Expected `(?P<want>[^`]+)`(?P<bound> (?:of length )?[<>=]+ [-\d.]+)?(?:, got `(?P<got>[^`]+)`)?"
)
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_TYPE_NAMES = {"int": "an integer", "float": "a number", "str": "a text", "object": "an object", "array": "a list"}


def _type_fault(error: msgspec.ValidationError, line: bytes) -> RowFault:
    """msgspec's message in the words of the format: the key, what it must be, what stands there."""
    message = str(error)
    at = _PATH.search(message)
    path = at["path"] if at else ""
    key = re.split(r"[.\[]", path, maxsplit=1)[0] if path else None
    reason = _PATH.sub("", message)
    expected = _EXPECTED.match(reason)
    if expected:
        wanted = [_TYPE_NAMES.get(name, name) for name in expected["want"].split(" | ") if name != "null"]
        reason = f"must be {' or '.join(wanted)}{expected['bound'] or ''}"
    if key is None or key not in RULES:
        return RowFault(f"in a row: {reason}", fix="write one JSON object on each line")
    try:
        found = f", got {_describe(msgspec.json.decode(line)[key])}"
    except (msgspec.DecodeError, RecursionError):
        found = ""
    return RowFault(f"`{path}` {reason[:1].lower()}{reason[1:]}{found}", key=key)


def _syntax_fault(error: msgspec.DecodeError, line: bytes, complete: bool) -> RowFault:
    """Why a line is no JSON. Python's own reader is asked since it is the more talkative of the two."""
    shown = line[:40].decode("utf-8", "replace") + ("..." if len(line) > 40 else "")
    constants: list[str] = []
    try:
        json.loads(line.decode("utf-8"), parse_constant=constants.append)
    except UnicodeDecodeError as fault:
        return RowFault(
            f"not UTF-8: byte 0x{line[fault.start]:02x} at byte {fault.start}", fix="save the file as UTF-8"
        )
    except RecursionError:
        return RowFault("nested too deeply", fix="a row is one flat object")
    except json.JSONDecodeError as fault:
        if not complete and fault.pos >= len(line.decode("utf-8")) - 1 or not complete and "truncated" in str(error):
            return RowFault(f"the last line is cut off: {shown}", fix="fetch the file again: it is not whole")
        if not line.startswith(b"{"):
            return RowFault(f"not JSON: {shown}", fix=f"a trace has one JSON object on each line; {OTHER_FORMATS}")
        return RowFault(f"not JSON: {fault.msg} at column {fault.pos + 1}", fix="write one whole object on each line")
    except ValueError:
        return RowFault("a number with too many digits", fix="mend the line")
    if constants:
        return RowFault(f"{constants[0]} is no number in JSON", fix="leave the key out, or give a finite number")
    return RowFault("text with half a surrogate pair, which is no Unicode", fix="mend the escape \\ud800-\\udfff")


def _describe(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return f'the text "{value[:40]}"'
    if isinstance(value, (int, float)):
        try:
            return str(value)[:40]
        except ValueError:
            return "a number with too many digits"
    return "a list" if isinstance(value, list) else "an object"
