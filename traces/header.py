"""The optional first line of a trace: its defaults, its origin, the scheduler limits it is meant for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from traces.rows import INT64_MAX, RowFault

VERSION = 1


class Header(msgspec.Struct, kw_only=True):
    """What stands above the rows. A file without a header has all the defaults.

    `limits`: {"common" | "nano" | "vllm": {flag name with underscores: value}}, used where a flag is not given.
    `block_size` (tokens of one hash id), `hash_kind` and `hash_scope` say what `hash_ids` mean; `salt` enters every made
    token id. `time_origin`: the wall-clock moment of arrival 0, ISO 8601. `extra`: the unknown keys, verbatim.
    """

    name: str | None = None
    licence: str | None = None
    source: Any = None
    limits: dict[str, dict[str, Any]] = {}
    block_size: Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)] = 512
    hash_kind: Literal["chained", "content"] = "chained"
    hash_scope: Literal["file", "session"] = "file"
    time_origin: str | None = None
    salt: str | int = ""
    length_tokenizer: str | None = None
    on_import: Any = None
    extra: dict[str, Any] = {}

    def canonical_line(self) -> bytes:
        """The header as the canonical form has it: b"" where everything is the default."""
        default = Header()
        known = {key: getattr(self, key) for key in self.__struct_fields__ if key != "extra"}
        body = {**self.extra, **{key: value for key, value in known.items() if value != getattr(default, key)}}
        return msgspec.json.encode({"benchctl_trace": VERSION, **body}, order="deterministic") if body else b""


_RULES = {
    "limits": '{"common": {...}, "nano": {...}, "vllm": {...}}, each an object of limits',
    "block_size": "an integer >= 1: tokens of one hash id",
    "hash_kind": '"chained" or "content"',
    "hash_scope": '"file" or "session"',
    "salt": "a text or an integer",
}


def is_header(line: bytes) -> bool:
    """Whether a first line is a header. Only a line that names the key is decoded."""
    if b'"benchctl_trace"' not in line:
        return False
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return False  # the reader of rows says what is wrong with it
    return isinstance(raw, dict) and "benchctl_trace" in raw


def decode_header(line: bytes) -> Header:
    """`line` is one where `is_header` holds. Raises RowFault."""
    raw = msgspec.json.decode(line)
    version = raw.pop("benchctl_trace")
    if isinstance(version, bool) or version != VERSION:
        raise RowFault(
            f"trace version {version!r}; this program reads {VERSION}", fix=f'write "benchctl_trace": {VERSION}'
        )
    known = {key: value for key, value in raw.items() if key in Header.__struct_fields__ and key != "extra"}
    known = {key: value for key, value in known.items() if value is not None}  # null is as good as absent
    if isinstance(known.get("block_size"), float) and known["block_size"].is_integer():
        known["block_size"] = int(known["block_size"])
    try:
        header = msgspec.convert(known, Header)
    except msgspec.ValidationError as error:
        key = str(error).partition("`$.")[2].partition("`")[0].split(".")[0].split("[")[0]
        what = str(error).partition(" - at ")[0].replace("`", "")
        raise RowFault(f"header key `{key}`: {what}", fix=f"`{key}` must be {_RULES.get(key, 'a text')}") from None
    header.extra = {key: value for key, value in raw.items() if key not in known and value is not None}
    return header
