"""AIPerf's single_turn and multi_turn inputs: texts with optional times or delays, both in milliseconds.

A text may stand in `text`, in a list `texts`, or beside images and sounds, which are kept as media. Source: ai-dynamo/aiperf, docs and loaders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, Reader, Sample, list_of, object_of, rest, text_of, whole
from traces.rows import Row, RowFault

MEDIA = {"image": "image", "images": "image", "audio": "audio", "audios": "audio", "video": "video", "videos": "video"}
USED = frozenset({"type", "text", "texts", "timestamp", "delay", "session_id", "output_length", "turns", *MEDIA})


class AiperfReader(Reader):
    origin = "zero"
    sorts = True  # a line is a conversation, and the next one may begin before its last turn

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.synthesizes_times = not _timed(self.sample.first)

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        session = text_of(record.get("session_id"), "session_id")
        if record.get("turns") is None:
            return (self._turn(record, number, session, None, 0),)
        session = session or f"conversation-{number}"
        drafts: list[Draft] = []
        for turn, entry in enumerate(list_of(record["turns"], "turns"), 1):
            before = f"{session}-t{turn - 1}" if drafts else None
            drafts.append(self._turn(object_of(entry, "a turn"), number, session, before, turn))
        return drafts

    def _turn(self, entry: dict[str, Any], number: int, session: str | None, before: str | None, turn: int) -> Draft:
        row = Row(session=session, output_length=whole(entry.get("output_length"), "output_length"))
        row.src = {"row": number, **rest(entry, USED)}
        if turn:
            row.id, row.turn = f"{session}-t{turn}", turn
        texts = entry.get("texts")
        if texts is not None:
            words: list[Any] = []
            for part in list_of(texts, "texts"):
                # A part is a text, or an object of named contents.
                words += (
                    [part] if isinstance(part, str) else list_of(object_of(part, "texts").get("contents"), "contents")
                )
            row.prompt = "\n".join(str(word) for word in words)
        else:
            row.prompt = text_of(entry.get("text"), "text")
        if not row.prompt:
            raise RowFault("a turn without text", fix="mend the row, or --skip-bad")
        media = [{"type": kind, "id": f"{number}.{turn}.{key}"} for key, kind in MEDIA.items() if entry.get(key)]
        row.media = media or None
        if before is not None:
            row.parents = (before,)
        if entry.get("delay") is not None:
            row.think_s = self.time(entry["delay"], "ms", "delay") / 1e9
        time = None if entry.get("timestamp") is None else self.time(entry["timestamp"], "ms", "timestamp")
        return Draft(row, time)


def _timed(first: dict[str, Any]) -> bool:
    turns = first.get("turns")
    entries = [first, *(turns if isinstance(turns, list) else [])]
    return any(isinstance(entry, dict) and entry.get("timestamp") is not None for entry in entries)


def tell(sample: Sample) -> bool:
    keys = set(sample.first)
    if sample.kind == "csv" or not keys & {"text", "texts", "turns"}:
        return False
    turns = sample.first.get("turns")
    return (
        turns is None
        or isinstance(turns, list)
        and not any("llm_calls" in turn for turn in turns if isinstance(turn, dict))
    )


FORMAT = Format("aiperf", "AIPerf single_turn and multi_turn inputs (JSONL)", tell, AiperfReader)
