"""LMSYS-Chat-1M (no times) and WildChat (a time for each message), as JSON lines or an array.

Columns about the user (hashed address, header, country, state) and moderation are dropped on import. WildChat's clock is that of a message, where the
question has none that of its answer. Source: the cards of lmsys/lmsys-chat-1m and allenai/WildChat.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, ImportOptions, Sample, list_of, object_of, text_of
from traces.formats.sharegpt import ROLES, ConversationReader, Message
from traces.formats.times import moment_ns

KEPT = ("language", "turn", "redacted", "toxic")


class ChatReader(ConversationReader):
    sorts = True

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        entries = sample.first.get("conversation")
        timed = isinstance(entries, list) and any(isinstance(e, dict) and e.get("timestamp") for e in entries)
        self.synthesizes_times = not timed
        if timed:
            self.clock_has_zone = True
            self.assumed.append("a request arrives at its question's time, where that is missing at its answer's")

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        messages: list[Message] = []
        asked: int | None = None
        for entry in list_of(record.get("conversation"), "conversation"):
            turn = object_of(entry, "a message")
            role = ROLES.get(str(turn.get("role")).lower())
            text = turn.get("content")
            if role is None or not isinstance(text, str) or not text:
                self.counts["empty messages, left out"] += 1
                continue
            stamp = turn.get("timestamp")
            time = None if stamp is None or self.synthesizes_times else moment_ns(stamp, "s", "timestamp")
            if role == "user":
                asked = time
            messages.append(Message(role, text, asked if asked is not None else time))
        name = text_of(record.get("conversation_id") or record.get("conversation_hash"), "conversation_id")
        src = {"row": number, **{key: record[key] for key in KEPT if record.get(key) is not None}}
        drafts = self.requests_of(self.session_name(name, number), messages, src)
        model = text_of(record.get("model"), "model")
        for draft in drafts:
            draft.row.model = model
        if not self.synthesizes_times:
            _think(drafts)
        return drafts


def _think(drafts: list[Draft]) -> None:
    """The gap between two turns, too long by the answer; a turn whose time lies before the last one's begins anew."""
    for before, after in zip(drafts, drafts[1:], strict=False):
        if before.time_ns is None or after.time_ns is None or after.time_ns < before.time_ns:
            after.row.parents = None
        else:
            after.row.think_s = (after.time_ns - before.time_ns) / 1e9


FORMAT = Format(
    "chats",
    "LMSYS-Chat-1M and WildChat",
    lambda sample: (
        sample.has_keys("conversation") and bool({"conversation_id", "conversation_hash"} & set(sample.first))
    ),
    ChatReader,
)
