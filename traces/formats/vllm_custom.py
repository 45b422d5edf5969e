"""vLLM bench's `custom` dataset: a prompt (text or token ids) and its output_tokens; and SGLang's openai JSONL without ids.

No times: arrivals are drawn by rate. Source: vLLM, benchmarks/datasets; SGLang, bench_serving.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, Reader, Sample, rest, whole
from traces.formats.chat import read_payload
from traces.formats.mooncake import fill
from traces.rows import Row

USED = frozenset(
    {"prompt", "messages", "tools", "output_tokens", "output_length", "max_tokens", "max_completion_tokens", "model"}
)


class VllmCustomReader(Reader):
    synthesizes_times = True

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        payload = read_payload(record)
        row = Row(src={"row": number, **{k: v for k, v in rest(record, USED).items() if k not in payload.sampling}})
        fill(row, payload)
        row.prompt_token_ids = payload.prompt_token_ids
        row.output_length = whole(record.get("output_tokens", record.get("output_length")), "output_tokens")
        return (Draft(row),)


def tell(sample: Sample) -> bool:
    return (
        sample.kind != "csv"
        and bool({"prompt", "messages"} & set(sample.first))
        and not {"body", "response"} & set(sample.first)
    )


FORMAT = Format("vllm-custom", "vLLM bench's custom dataset, SGLang's openai JSONL", tell, VllmCustomReader)
