"""What made traces are modelled on: tables of quantiles of published traces, and how their prompts share tokens.

Statistics only: no row of anybody's traffic is here. Where a table has the quantiles 50, 90, 99 and 100, they are those of the full public
file; the others come from its first rows (1,000 to 6,000 of them), moved where needed so that the mean is the published one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from traces.arrival_process import ArrivalProcess
from traces.quantiles import Table, table


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens. `first`: the first prompt of a session; `more`: new tokens of a later turn, after all that was said.

    `turns` None: every request stands alone. `shared`: (tokens, weight) of system prompts, part of `first`. `think`: s.
    `correlation`: Spearman's, of first prompt and output. `target`: what `trace info` should say, for the tests and the page.
    """

    name: str
    about: str
    source: str
    first: Table
    output: Table
    arrivals: ArrivalProcess
    more: Table | None = None
    turns: Table | None = None
    think: Table | None = None
    max_context: int | None = None
    correlation: float = 0.0
    shared: tuple[tuple[int, float], ...] = ()
    pool: tuple[int, float, Table] | None = None  # passages: how many, Zipf exponent, tokens of one
    num_passages: Table | None = None
    keep: tuple[int, int, int, int] | None = (
        None  # vLLM's filter: least prompt, least output, longest prompt, longest both
    )
    target: dict[str, tuple[float, float]] = field(default_factory=dict)  # figure → (value, relative bound)


THINK = table((0, 2), (10, 15), (25, 26), (50, 40), (75, 90), (90, 300), (95, 800), (99, 1700), (100, 1800))

AZURE_CONV = Shape(
    "azure-conv",
    "chat service: prompts of about 1,000 tokens, answers of about 200, nearly Poisson",
    "Azure LLM inference trace 2023, conversation (CC-BY-4.0, Microsoft)",
    first=table(
        (0, 2), (1, 27), (5, 167), (10, 203), (20, 389), (30, 420), (40, 940), (50, 1020), (60, 1056), (70, 1120), (80, 1290),
        (90, 2734), (95, 3700), (97.5, 4080), (99, 4142), (99.9, 6000), (100, 14050),
    ),
    output=table(
        (0, 7), (1, 16), (5, 36), (10, 50), (20, 74), (30, 90), (40, 108), (50, 129), (60, 190), (70, 320), (80, 396), (90, 424),
        (95, 470), (99, 601), (99.9, 930), (100, 1000),
    ),
    correlation=0.07,
    arrivals=ArrivalProcess(5.53, gap="gamma", shape=0.871),
    target={"input mean": (1154.7, 0.05), "input p50": (1020, 0.05), "input p99": (4142, 0.1), "output mean": (211.1, 0.05), "output p50": (129, 0.08),
            "rate": (5.53, 0.05), "cv": (1.094, 0.1)},
)  # fmt: skip

AZURE_CODE = Shape(
    "azure-code",
    "code completion: long prompts up to a cap of 7,436 tokens, answers of a few tokens, heavy bursts",
    "Azure LLM inference trace 2023, code (CC-BY-4.0, Microsoft)",
    first=table(
        (0, 3), (1, 15), (5, 59), (10, 140), (20, 370), (30, 760), (40, 1080), (50, 1469), (60, 1990), (70, 2520), (80, 3400),
        (90, 5188), (96.55, 7434), (96.56, 7435), (97.72, 7435), (97.73, 7436), (99.99, 7436), (100, 7437),
    ),
    output=table(
        (0, 6), (5, 6), (10, 7), (20, 8), (30, 9), (40, 11), (50, 13), (60, 16), (70, 19), (80, 27), (90, 55), (95, 90), (99, 252),
        (99.9, 820), (100, 1899),
    ),
    correlation=-0.02,
    arrivals=ArrivalProcess(
        2.566, gap="empirical", gaps=table(
            (0, 0.000006), (1, 0.000022), (5, 0.0001), (10, 0.00034), (20, 0.0018), (30, 0.0047), (40, 0.0263), (50, 0.0605), (60, 0.0932),
            (70, 0.1001), (80, 0.1556), (90, 0.2533), (95, 0.3975), (99, 2.4), (99.72, 30), (99.9, 60), (100, 217),
        ),
    ),
    target={"input mean": (2047.8, 0.05), "input p50": (1469, 0.06), "input p99": (7436, 0.001), "output mean": (27.9, 0.08), "output p50": (13, 0.08),
            "rate": (2.566, 0.15), "cv": (13.15, 0.3)},
)  # fmt: skip

SHAREGPT_FIRST = table(
    (0, 1), (10, 16), (20, 23), (30, 32), (40, 45), (50, 64), (60, 95), (70, 149), (80, 262), (90, 600), (95, 1089), (99, 2382), (100, 7398)
)  # fmt: skip
SHAREGPT_OUTPUT = table(
    (0, 2), (10, 84), (20, 181), (30, 271), (40, 346), (50, 415), (60, 493), (70, 581), (80, 683), (90, 834), (95, 920), (99, 998), (100, 1024)
)  # fmt: skip

SHAREGPT = Shape(
    "sharegpt",
    "multi-turn chat, each turn carrying all before it, contexts up to 8,192 tokens",
    "ShareGPT (GPT-4, Llama-2 tokens, 8,192 filter), lengths only; think times of RAGPulse",
    first=SHAREGPT_FIRST,
    more=table(
        (0, 1), (10, 6), (20, 10), (30, 15), (40, 20), (50, 26), (60, 36), (70, 51), (80, 84), (90, 230), (95, 711), (99, 2130), (100, 6999)
    ),
    output=SHAREGPT_OUTPUT,
    turns=table(
        (0, 1), (20.4, 1), (20.41, 2), (32, 3), (42, 4), (53, 5), (62, 6), (71, 7.5), (80, 9.5), (90, 12.5), (95, 15.5), (99, 23.5), (100, 56)
    ),
    think=THINK,
    max_context=8192,
    arrivals=ArrivalProcess(1.0),
    target={"output p50": (415, 0.08), "output p90": (834, 0.05), "turns mean": (5.41, 0.25), "single turn": (0.204, 0.35), "input p50": (1730, 0.25)},
)  # fmt: skip

SHAREGPT_SINGLE = Shape(
    "sharegpt-single",
    "the first turns alone, with vLLM bench's length filter",
    "ShareGPT as vLLM's benchmark samples it: prompt and output at least 4 tokens, prompt at most 1,024, both at most 2,048",
    first=SHAREGPT_FIRST,
    output=SHAREGPT_OUTPUT,
    keep=(4, 4, 1024, 2048),
    arrivals=ArrivalProcess(10.0),
    target={"input mean": (136, 0.15), "input p50": (58, 0.15), "input p90": (381, 0.2), "output mean": (472, 0.1), "output p50": (473, 0.15)},
)  # fmt: skip

MOONCAKE_AGENTS = Shape(
    "mooncake-agents",
    "agents: few system prompts, loops of tool calls over a growing context, short answers",
    "Mooncake synthetic trace (FAST'25, Apache-2.0): its output lengths, prompt lengths and share of reused tokens",
    first=table((0, 13), (10, 24), (20, 35), (30, 90), (40, 700), (50, 5200), (60, 9000), (70, 11500), (80, 15500), (90, 25000), (95, 31000), (99, 48000), (100, 150000)),
    more=table((0, 8), (10, 60), (30, 300), (50, 900), (70, 2200), (90, 6000), (99, 16000), (100, 40000)),
    output=table(
        (0, 1), (1, 2), (5, 3), (10, 4), (20, 9), (30, 20), (40, 40), (50, 69), (60, 130), (70, 205), (80, 290), (90, 389), (95, 500), (99, 768), (100, 893)
    ),
    turns=table((0, 1), (42, 1), (60, 2), (75, 3), (88, 5), (95, 8), (99, 14), (100, 30)),
    think=table((0, 0.2), (10, 0.5), (50, 2), (90, 8), (99, 30), (100, 60)),
    shared=((1024, 0.6), (2048, 0.3), (512, 0.1)),
    max_context=191_378,
    arrivals=ArrivalProcess(1.5),
    target={"output p50": (69, 0.12), "output mean": (149.1, 0.12), "input mean": (15325, 0.25), "token hit": (0.651, 0.15)},
)  # fmt: skip

RAG = Shape(
    "rag",
    "retrieval: one system prompt, six passages by popularity, a short question, some history",
    "RAGPulse (MIT)",
    first=table((0, 130), (10, 500), (25, 520), (50, 640), (75, 860), (90, 1250), (99, 2500), (100, 4000)),
    output=table((0, 31), (1, 47), (5, 76), (10, 92), (20, 122), (30, 155), (40, 192), (50, 234), (60, 284), (70, 344), (80, 428), (90, 563), (95, 670), (99, 891), (100, 2183)),
    shared=((905, 1.0),),
    pool=(8000, 0.5, table((0, 60), (10, 150), (50, 260), (90, 350), (100, 420))),
    num_passages=table((0, 0), (13, 0), (13.1, 6), (100, 6)),
    arrivals=ArrivalProcess(0.0059, gap="gamma", shape=0.4),
    correlation=0.42,
    target={"input mean": (2943.6, 0.1), "input p50": (3140, 0.12), "output mean": (283.2, 0.08), "output p50": (234, 0.08), "token hit": (0.315, 0.15)},
)  # fmt: skip

LONG_CONTEXT = Shape(
    "long-context",
    "long documents and long chats: 12,000 tokens on average, 126,000 at most",
    "Mooncake conversation trace (FAST'25, Apache-2.0)",
    first=table(
        (0, 380), (5, 520), (10, 760), (20, 1350), (30, 2600), (40, 3900), (50, 5500), (60, 7500), (70, 10100), (80, 14200), (90, 22500), (95, 38000), (99, 80000),
        (100, 125600),
    ),
    more=table((0, 10), (20, 40), (50, 160), (80, 900), (95, 5000), (99, 15000), (100, 40000)),
    output=table(
        (0, 1), (0.6, 1), (0.61, 3), (2.7, 3), (5, 9), (10, 22), (20, 88), (30, 200), (40, 285), (50, 350), (60, 404), (70, 452), (80, 515), (90, 597), (95, 690),
        (99, 1119), (99.75, 2000), (100, 2000),
    ),
    turns=table((0, 1), (70, 1), (80, 2), (91, 3), (97, 5), (100, 9)),
    think=table((0, 5), (10, 20), (50, 60), (90, 300), (99, 1200), (100, 2400)),
    shared=((512, 1.0),),
    max_context=128_000,
    arrivals=ArrivalProcess(2.0),
    target={"input mean": (12035, 0.2), "input p50": (6909, 0.25), "output mean": (342.6, 0.1), "output p50": (350, 0.08), "token hit": (0.374, 0.25)},
)  # fmt: skip

REASONING = Shape(
    "reasoning",
    "short questions, long chains of thought: answers up to 32,768 tokens",
    "ServeGen deepseek-r1, quantiles of its clients (Apache-2.0)",
    first=table(
        (0, 2), (5, 14), (10, 22), (20, 48), (30, 90), (40, 140), (50, 208), (60, 330), (70, 560), (80, 1050), (90, 2092), (95, 4800), (98, 9500), (99, 23423), (100, 57284)
    ),
    output=table(
        (0, 10), (5, 150), (10, 240), (20, 390), (30, 520), (40, 650), (50, 792), (60, 980), (70, 1250), (80, 1780), (90, 3432), (95, 5300), (99, 12607),
        (99.95, 24000), (100, 32768),
    ),
    arrivals=ArrivalProcess(1.0, gap="gamma", shape=0.5),
    target={"input mean": (1268, 0.15), "input p50": (208, 0.1), "output mean": (1527, 0.1), "output p50": (792, 0.06)},
)  # fmt: skip

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (SHAREGPT, SHAREGPT_SINGLE, AZURE_CONV, AZURE_CODE, MOONCAKE_AGENTS, RAG, LONG_CONTEXT, REASONING)
}
