"""SGLang bench's agentic conversations: one JSON document, a list of turns for each, of which only the new messages are kept.

`prompt_tokens` is the whole prompt of a turn; answers are not in the file, since that benchmark appends what the server said. So a turn
carries the turn before with its answer. No times. Source: sgl-project/sglang, benchmark/datasets/agentic*.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample, list_of, object_of, whole
from traces.formats.chat import content_text, counter
from traces.request import Carry
from traces.rows import Row, RowFault

OUTPUT_LENGTH = 220  # where the user gives none: that benchmark's own default


class AgenticReader(Reader):
    synthesizes_times = True

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self._count, self._count_name = counter(options)
        self._output = options.output_length or OUTPUT_LENGTH
        self.assumed.append(f"outputs of {self._output} tokens: --output-length N gives another number")

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft | RowFault]:
        drafts: list[Draft | RowFault] = []
        for place, turns in enumerate(list_of(record.get("conversations"), "conversations")):
            session = f"conversation-{place}"
            before: Row | None = None
            try:
                for entry in list_of(turns, "a conversation"):
                    src = {"row": number, "conversation": place}
                    before = self._turn(object_of(entry, "a turn"), session, before, src)
                    drafts.append(Draft(before))
            except RowFault as fault:  # what is left of a conversation would not hold what it says it does
                drafts.append(RowFault(f"{session}: {fault.what}", fix=fault.fix))
        return drafts

    def _turn(self, entry: dict[str, Any], session: str, before: Row | None, src: dict[str, Any]) -> Row:
        turn = 1 if before is None else (before.turn or 0) + 1
        row = Row(id=f"{session}-t{turn}", session=session, turn=turn, output_length=self._output, src=src)
        held = 0 if before is None else (before.input_length or 0) + self._output
        row.input_length = whole(entry.get("prompt_tokens"), "prompt_tokens")
        if row.input_length is None:
            new = sum(self._count(content_text(message)) for message in list_of(entry.get("messages"), "messages"))
            row.input_length = held + max(new, 1)
            self.header["length_tokenizer"] = self._count_name
        if before is not None and before.id is not None:
            row.parents = (before.id,)
            if row.input_length > 0:
                row.carry = Carry(before.id, min(held, row.input_length))
        if row.input_length < 1:
            raise RowFault("a prompt without tokens", fix="mend the document, or --skip-bad")
        return row


def tell(sample: Sample) -> bool:
    found = sample.first.get("conversations")
    if sample.kind == "csv" or "conversations" not in sample.first or "id" in sample.first:
        return False
    if found is None:  # a document longer than the head that is looked at
        return "metadata" in sample.first
    return isinstance(found, list) and bool(found) and isinstance(found[0], list)


FORMAT = Format("sglang-agentic", "SGLang bench's agentic conversations (JSON)", tell, AgenticReader)
