"""Qwen-Bailian usage traces: seconds, hash ids of 16-token blocks that name a block's content, parents by chat id.

A parent that is not in the file makes its child a root. The last answer's thinking is stripped from the next prompt, so nothing is
carried: the hash ids say what is shared. Source: alibaba-edu/qwen-bailian-usagetraces-anon, README.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample, list_of, rest, whole
from traces.rows import Row, RowFault

USED = frozenset({"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "turn", "hash_ids"})


class BailianReader(Reader):
    origin = "zero"

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self.header |= {"block_size": options.block_size or 16, "hash_kind": "content"}
        self._sessions: dict[int, str] = {}  # chat → its root's session

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        chat = whole(record.get("chat_id"), "chat_id")
        if chat is None:
            raise RowFault("no chat_id", fix="mend the row, or --skip-bad")
        parent = whole(record.get("parent_chat_id"), "parent_chat_id")
        row = Row(
            id=str(chat),
            input_length=whole(record.get("input_length"), "input_length"),
            output_length=whole(record.get("output_length"), "output_length"),
            turn=whole(record.get("turn"), "turn"),
            src={"row": number, **rest(record, USED)},
        )
        hash_ids = list_of(record.get("hash_ids") or [], "hash_ids")
        if hash_ids:
            row.hash_ids = tuple(hash_ids)
        else:
            self.counts["rows without hash_ids: their tokens are unique"] += 1
        if record.get("type") == "image":
            row.media = [{"type": "image", "id": str(chat)}]
        if parent is not None and parent >= 0 and parent in self._sessions:
            row.parents = (str(parent),)
            row.session = self._sessions[parent]
        else:
            if parent is not None and parent >= 0:
                self.counts["parents that are not in the file: the row is a root"] += 1
            row.session = str(chat)
        self._sessions[chat] = row.session
        return (Draft(row, self.time(record.get("timestamp"), "s", "timestamp")),)


FORMAT = Format(
    "bailian",
    "Qwen-Bailian usage traces (JSONL, content hash ids of 16 tokens)",
    lambda sample: sample.has_keys("chat_id", "parent_chat_id", "hash_ids"),
    BailianReader,
)
