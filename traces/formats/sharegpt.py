"""ShareGPT JSON and its variants (OpenChat's `items`): conversations without times, one request for each answer.

A prompt is everything said before the answer. Roles are read by name; an empty message is left out, an empty answer is no request, and an answer
without a question before it is part of the next prompt. Lengths are counted by the tokenizer, else estimated; texts are kept only when
asked for. vLLM's single-turn sampling is `--single-turn`. Source: the loaders of vLLM, SGLang and FastChat.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample, list_of, object_of, text_of
from traces.formats.chat import counter
from traces.request import Carry
from traces.rows import Row, RowFault

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "assistant": "assistant", "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
# vLLM's filter of its single-turn sampling: prompt and output at least 4, prompt at most 1,024, both at most 2,048 tokens.
LEAST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


@dataclass(frozen=True, slots=True)
class Message:
    role: str  # user, assistant, system or tool
    text: str
    time_ns: int | None = None


class ConversationReader(Reader):
    """Requests of one conversation; what its messages are called is a subclass's matter."""

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self._count, name = counter(options)
        self.header["length_tokenizer"] = name
        self._seen: dict[str, int] = {}
        if options.single_turn:
            self.assumed.append(
                f"single turns: the first question and its answer, both at least {LEAST}, prompt at most {LONGEST_PROMPT}, both together at most {LONGEST} tokens"
            )

    def session_name(self, given: str | None, number: int) -> str:
        """A name no other conversation of the file has."""
        name = given or f"conversation-{number}"
        times = self._seen[name] = self._seen.get(name, 0) + 1
        if times > 1:
            self.counts["conversation ids used twice, renamed"] += 1
            return f"{name}-{times}"
        return name

    def requests_of(self, session: str, messages: list[Message], src: dict[str, Any]) -> list[Draft]:
        drafts: list[Draft] = []
        context = 0  # tokens before the message at hand
        asked = False
        said: list[dict[str, str]] = []
        for message in messages:
            size = max(self._count(message.text), 1)
            if message.role == "assistant" and asked:
                drafts.append(self._request(session, len(drafts) + 1, context, size, said, drafts, message, src))
                asked = False
            elif message.role == "assistant":
                self.counts["answers without a question before them: part of the next prompt"] += 1
            else:
                asked = asked or message.role != "system"
            context += size
            said.append({"role": message.role, "content": message.text})
            if drafts and self.options.single_turn:
                break
        if not drafts:
            self.counts["conversations without a question and its answer"] += 1
        elif self.options.single_turn and not self._passes_filter(drafts[0].row):
            self.counts["conversations that vLLM's length filter leaves out"] += 1
            return []
        return drafts

    def _request(
        self, session: str, turn: int, context: int, output: int, said: list[dict[str, str]], before: list[Draft], answer: Message, src: dict[str, Any]
    ) -> Draft:  # fmt: skip
        row = Row(id=f"{session}-t{turn}", session=session, turn=turn, output_length=output, src=src)
        if self.options.text:
            row.messages = list(said)
        else:
            row.input_length = context
        if before:
            parent = before[-1].row
            row.parents = (str(parent.id),)
            if parent.input_length is not None and parent.output_length is not None:
                row.carry = Carry(str(parent.id), parent.input_length + parent.output_length)
        return Draft(row, answer.time_ns)

    def _passes_filter(self, row: Row) -> bool:
        prompt = row.input_length
        if prompt is None:
            prompt = sum(max(self._count(m["content"]), 1) for m in row.messages or ())
        output = row.output_length or 0
        return prompt >= LEAST and output >= LEAST and prompt <= LONGEST_PROMPT and prompt + output <= LONGEST


class ShareGptReader(ConversationReader):
    synthesizes_times = True

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        key = next((key for key in ("conversations", "items") if record.get(key) is not None), None)
        if key is None:
            raise RowFault("no conversations", fix="mend the entry, or --skip-bad")
        messages: list[Message] = []
        if isinstance(record.get("system"), str) and record["system"]:
            messages.append(Message("system", record["system"]))
        for entry in list_of(record[key], key):
            turn = object_of(entry, "a turn")
            role = ROLES.get(str(turn.get("from", turn.get("role"))).lower())
            text = turn.get("value", turn.get("content"))
            if role is None:
                self.counts["messages of an unknown role, left out"] += 1
            elif not isinstance(text, str) or not text:
                self.counts["empty messages, left out"] += 1
            else:
                messages.append(Message(role, text))
        session = self.session_name(text_of(record.get("id"), "id"), number)
        return self.requests_of(session, messages, {"row": number})


def tell(sample: Sample) -> bool:
    if sample.kind == "csv" or "conversation_id" in sample.first:
        return False
    return "conversations" in sample.first or "items" in sample.first and "requests" not in sample.first


FORMAT = Format("sharegpt", "ShareGPT JSON and OpenChat-like variants", tell, ShareGptReader)
