"""Name, formula and meaning of every metric that the summary prints, in the symbols of docs/metrics.md.

One list for the terminal, the page and the documentation; a test holds the three together.
"""

from __future__ import annotations

SYMBOLS: dict[str, str] = {
    "a": "intended arrival of a request, whatever the loop was doing then",
    "d": "when the loop handed it to the scheduler",
    "f": "when it was first scheduled: the end of that round's schedule()",
    "t_1 … t_n": "times of its n output tokens: the end of the round that gave them",
    "T": "end of the last round, counted from the run's beginning",
    "own time": "of a round: its t_end_s − max(its t_start_s, t_end_s of the round before); its whole duration where rounds do not overlap",
    "B": "max_num_batched_tokens, the token budget",
}

# key of the summary -> (formula, what it says)
FORMULAS: dict[str, tuple[str, str]] = {
    # latency
    "ttft": ("t_1 − a", "time to first token"),
    "tpot": ("(t_n − t_1) / (n − 1); null where n = 1", "time per output token, one value a request; its first token is left out"),
    "itl": ("t_{i+1} − t_i, every gap of every request, pooled", "inter-token latency"),
    "e2el": ("t_n − a", "end-to-end latency"),
    "queue": ("f − a", "waiting to be scheduled for the first time; queue + prefill + decode = e2el"),
    "prefill": ("t_1 − f", "from first scheduled to the first token; where rounds overlap it begins with the end of the round before, which still runs then"),
    "decode": ("t_n − t_1", "from the first token to the last"),
    "preempted": ("Σ (scheduled again − preempted), both when they take effect: at the end of the round before, where that still runs", "time without blocks after preemptions; inside prefill and decode"),
    "stalled": ("Σ own time of rounds that it was running in and that did not compute it", "the price of nano's prefill first; inside prefill and decode"),
    "ttft_admitted": ("t_1 − d", "TTFT as a client that starts its clock when it sends would see it"),
    "e2el_admitted": ("t_n − d", "E2E latency from admission"),
    "queue_admitted": ("f − d", "queueing inside the scheduler"),
    "dispatch": ("d − a", "how late the loop handed a request over"),
    # counts and rates
    "duration": ("T", "length of the run"),
    "completed": ("requests with status finished", "requests that emitted all their output"),
    "failed": ("requests with status rejected or unfinished", "requests that did not finish; never left out of attainment"),
    "total_input_tokens": ("Σ prompt tokens of finished requests", "input tokens served"),
    "total_output_tokens": ("Σ output tokens of finished requests", "output tokens served"),
    "request_throughput": ("completed / T", "finished requests per second"),
    "output_throughput": ("total_output_tokens / T", "output tokens per second"),
    "total_token_throughput": ("(total_input_tokens + total_output_tokens) / T", "tokens per second, both ways"),
    "steady": (
        "the same rates between the first and the last moment with concurrency ≥ 0.8 · max_concurrent_requests",
        "throughput without ramp-up and drain; requests and tokens that end or appear in the window; null where it is shorter than a tenth of the run, a peak",
    ),
    "max_concurrent_requests": ("max over time of #{requests: a ≤ time < t_n}", "peak concurrency, by an exact sweep"),
    "request_goodput": ("good / T", "requests per second that met every SLO"),
    "attainment": ("good / all requests, the rejected and unfinished among them", "share of requests that met every SLO"),
    # prefix cache
    "queried_tokens": ("Σ prompt_tokens of every request admitted", "tokens looked up in the prefix cache by first admissions"),
    "hit_tokens": ("Σ cached_tokens over first admissions", "tokens they took from the prefix cache"),
    "resumed_queried_tokens": (
        "Σ known tokens at every return of a preempted request",
        "tokens looked up by preempted requests that came back",
    ),
    "resumed_hit_tokens": ("Σ cached_tokens over those returns", "tokens they took from the prefix cache, their own mostly"),
    "hit_rate": ("hit_tokens / queried_tokens", "share of the tokens looked up that was found"),
    "upper_bound": ("hit_tokens / queried_tokens with an unbounded cache, each request admitted once, in order of the trace", "what the trace offers"),
    # scheduler
    "rounds": ("calls of schedule(), by kind: prefill, decode, mixed, empty", "rounds"),
    "mixed_share": ("mixed rounds / rounds that scheduled something", "share of rounds with prefill and decode together"),
    "tokens_per_round": ("Σ num_tokens of a round that scheduled something", "batch size in tokens"),
    "budget_use": ("Σ tokens / Σ B over rounds that scheduled something; for nano over its prefill rounds, as its decodes do not use the budget", "use of the token budget"),
    "max_num_seqs": ("max over rounds of num_seqs", "largest batch in sequences"),
    "preemptions": ("Σ preempted over rounds", "requests that lost their blocks"),
    "discarded_tokens": ("Σ computed tokens at each preemption", "computed tokens thrown away"),
    "recomputed_tokens": ("Σ tokens scheduled at positions that had been computed before", "work done twice"),
    "evictions": ("Σ evicted over rounds", "free blocks whose cached content was lost because they were taken again"),
    "peak_blocks": ("max over time of (usable − free) blocks", "most blocks in use at once, moments inside schedule() included"),
    "stop_waiting": ("rounds by the reason for which the waiting loop stopped", "why no more requests were admitted"),
    "stop_running": ("rounds by the reason for which the running loop stopped", "why no more running requests were scheduled"),
    "record_share": ("Σ record_s / (last t_end_s − first t_start_s), wall clock only", "share of the run spent on recording it"),
    "host": ("Σ schedule_s, prepare_s, update_s, record_s; Σ device_s", "where the time of the rounds went"),
}  # fmt: skip

PERCENTILE_RULE = (
    "A percentile p is printed when at least one sample lies beyond it, n · (1 − p/100) ≥ 1: p50 needs 2 samples, p90 10, p95 20, p99 100. "
    "Values between samples are interpolated linearly; std is that of the samples as a population."
)
