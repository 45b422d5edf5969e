"""aibrix workloads: one line is a moment (ms) with one or several requests. Source: vllm-project/aibrix, benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, Reader, Sample, list_of, object_of, rest, text_of, whole
from traces.rows import Row

# Old files spell the keys with capitals and blanks.
SPELLINGS = {
    "Prompt Length": "prompt_length",
    "Output Length": "output_length",
    "Prompt": "prompt",
    "Session ID": "session_id",
}
USED = frozenset(SPELLINGS.values())


class AibrixReader(Reader):
    origin = "zero"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._turns: dict[str, tuple[str, int]] = {}

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        time = self.time(record.get("timestamp"), "ms", "timestamp")
        drafts = []
        for place, entry in enumerate(list_of(record.get("requests"), "requests")):
            call = {SPELLINGS.get(key, key): value for key, value in object_of(entry, "a request").items()}
            row = Row(
                id=f"{number}.{place}",
                output_length=whole(call.get("output_length"), "output_length"),
                src={"row": number, **rest(call, USED)},
            )
            length = whole(call.get("prompt_length"), "prompt_length")
            prompt = text_of(call.get("prompt"), "prompt")
            if prompt is not None and (self.options.text or length is None):
                row.prompt = prompt
            else:
                row.input_length = length
            session = text_of(call.get("session_id"), "session_id")
            if session is not None:
                before, turn = self._turns.get(session, (None, 0))
                row.session, row.turn = session, turn + 1
                if before is not None:
                    row.parents = (before,)
                self._turns[session] = (str(row.id), turn + 1)
            drafts.append(Draft(row, time))
        return drafts


def tell(sample: Sample) -> bool:
    requests = sample.first.get("requests")
    if not sample.has_keys("timestamp", "requests") or not isinstance(requests, list):
        return False
    return not requests or isinstance(requests[0], dict) and "hash_ids" not in requests[0]


FORMAT = Format("aibrix", "aibrix workloads (JSONL, several requests a line)", tell, AibrixReader)
