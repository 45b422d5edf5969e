"""The engine for speed: fused Triton kernels, CUDA graphs, one copy to the device and one back a round.

Takes and gives the same as engines/torch_engine/engine.py, which stays its oracle. `launch` returns while the device works.
Without a card it runs in Triton's interpreter (TRITON_INTERPRET=1), slowly: that is for tests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engines.interface import EngineLimits, ScheduledBatch, StepResult
from engines.kernels.launch import compiling
from engines.model.memory import available_bytes, card_memory, is_out_of_memory
from engines.model.transformer import Model
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.fused_forward import FusedForward
from engines.torch_engine.memory import (
    GRAPH_BYTES,
    buffers_out_of_memory,
    cache_out_of_memory,
    forward_out_of_memory,
    kv_bytes_per_token,
)
from engines.torch_engine.round_inputs import DeviceInputs, HostInputs, Shape, TableRows, chunk_tiles, gather, write
from engines.torch_engine.verify import Watch, WatchedRows
from engines.torch_engine.work import Work
from traces.errors import BenchctlError

IN_FLIGHT = 4  # rounds whose host buffers are kept apart
MAX_GRAPH_CHUNK_TOKENS = 2560  # rounds with prefill up to here are worth a graph: above, the device outlasts the host


@dataclass(slots=True)
class Flight:
    """Host buffers of a round in flight, reused once its tokens have arrived."""

    inputs: Tensor  # int32, pinned
    tokens: Tensor  # int32 [max_seqs], pinned
    done: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class PreparedRound:
    """A round whose inputs are laid out on the host. `eager`: starting it takes the host milliseconds, kernel by kernel."""

    shape: Shape
    flight: Flight
    inputs: HostInputs
    num_seqs: int
    watched: WatchedRows | None
    prepare_s: float
    eager: bool


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A round that was launched."""

    flight: Flight
    num_yields: int
    padded_tokens: int
    mode: str
    prepare_s: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # before the inputs are copied, after the last kernel
    forward_s: float | None  # without a card: measured
    logits: Tensor | None
    flops: float
    bytes: float


class TritonEngine:
    """An `Engine`. `max_num_batched_tokens` and `max_num_seqs` bound a round, and so its buffers.

    `enforce_eager` captures no graphs. `measuring`: all that an engine of these limits holds but the cache, of which there is one
    block, and most graphs, of which `graph_bytes_left` says what they would take; rounds run two layers. For memory.py.
    Raises BenchctlError for limits out of range and where memory does not suffice.
    """

    name = "torch"

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        enforce_eager: bool = False,
        return_logits: bool = False,
        measuring: bool = False,
    ) -> None:
        config = model.config
        max_model_len = config.max_position_embeddings if max_model_len is None else max_model_len
        TorchEngine._check(model, num_blocks, block_size, max_model_len, "reference", temperature)
        if model.team is not None:  # the other ranks build theirs
            model.team.build(
                "TritonEngine", num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs, max_model_len=max_model_len, temperature=temperature, enforce_eager=enforce_eager,
                measuring=measuring,
            )  # fmt: skip
        self.model = model
        self.limits = EngineLimits(num_blocks, block_size, max_model_len, config.vocab_size)
        self.seed = seed if temperature > 0 else None
        self.return_logits = return_logits
        self.max_tokens, self.max_seqs = max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens)
        on_card = model.device.type == "cuda"
        graph_bytes = GRAPH_BYTES if on_card and not enforce_eager else 0
        beside = (self.max_tokens, self.max_seqs, max_model_len, graph_bytes)
        blocks_here = 1 if measuring else num_blocks
        if blocks_here * block_size * kv_bytes_per_token(model.local, model.dtype) > available_bytes(model.device):
            raise cache_out_of_memory(model, num_blocks, block_size, beside)
        self._first_and_last = sorted({0, config.num_layers - 1})  # which differ in what is launched
        self.layers = self._first_and_last if measuring else None
        shape = (config.num_layers, blocks_here, block_size, model.local.num_kv_heads, config.head_dim)
        max_blocks = min(-(-max_model_len // block_size), num_blocks)
        num_rows = 2 * self.max_seqs
        try:
            self.k_cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
            self.v_cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
            with torch.inference_mode():
                self.block_tables = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=model.device)
                self.forward = FusedForward(
                    model, self.k_cache, self.v_cache, self.block_tables,
                    max_tokens=self.max_tokens, max_seqs=self.max_seqs, max_model_len=max_model_len, temperature=temperature,
                )  # fmt: skip
            self._prepare(num_rows, max_blocks, on_card, enforce_eager, measuring)
        except (RuntimeError, MemoryError) as error:
            if model.team is not None:
                model.team.explain(error)
            if not is_out_of_memory(error):
                raise
            self.close()
            if measuring:
                raise buffers_out_of_memory(model, *beside) from None
            raise cache_out_of_memory(model, num_blocks, block_size, beside) from None

    def _prepare(
        self, num_rows: int, max_blocks: int, on_card: bool, enforce_eager: bool, measuring: bool = False
    ) -> None:
        """Inputs' buffers on both sides; every kernel compiled and every graph captured that a round can meet."""
        self.rows = TableRows(num_rows, max_blocks)
        most_tiles = self._most_tiles(self.max_tokens, self.max_seqs)
        exact = self._exact_shape(self.max_tokens, self.max_seqs, most_tiles, max(num_rows * max_blocks, 64))
        # A graph has room for tiles and updates that a small engine may never need.
        decodes, mixed = self._graph_shapes()
        largest = max(shape.size for shape in (exact, *decodes, *mixed))
        self.inputs = torch.zeros(largest, dtype=torch.int32, device=self.model.device)
        self.flights = [
            Flight(
                torch.zeros(largest, dtype=torch.int32, pin_memory=on_card),
                torch.zeros(self.max_seqs, dtype=torch.int32, pin_memory=on_card),
            )
            for _ in range(IN_FLIGHT)
        ]
        self.next_flight = 0
        self.watch: Watch | None = None
        self.graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self.device_inputs: dict[Shape, DeviceInputs] = {}
        self.decode_shapes: list[Shape] = []
        self.mixed_shapes: list[Shape] = []
        self.work = Work(self.model)
        self.graph_bytes_left = 0
        if on_card:
            # What an earlier engine over this model met is compiled and loaded; a table's width decides how kernels read it.
            kind = (
                self.limits.block_size, self.max_tokens, self.max_seqs, self.forward.temperature > 0, enforce_eager,
                max_blocks % 16 == 0, max_blocks == 1,
            )  # fmt: skip
            if kind not in self.model.kernels_ready:
                self._compile_kernels()
                self._load_kernels(16 if enforce_eager else MAX_GRAPH_CHUNK_TOKENS)
                self.model.kernels_ready.add(kind)
            if not enforce_eager:
                try:
                    if measuring:
                        self.graph_bytes_left = self._sample_graphs()
                    else:
                        self._capture_graphs()
                except RuntimeError as error:
                    if self.model.parallel.size == 1 or is_out_of_memory(error):
                        raise
                    raise BenchctlError(
                        f"CUDA graphs over {self.model.parallel.size} ranks cannot be captured here: {str(error).splitlines()[0]}",
                        fix="--enforce-eager",
                        exit_code=1,
                    ) from None

    # -- shapes

    def _most_tiles(self, num_tokens: int, num_seqs: int) -> int:
        return num_tokens // self.forward.tokens_per_tile + num_seqs

    def _exact_shape(self, num_tokens: int, num_seqs: int, tiles: int, num_updates: int) -> Shape:
        return Shape(num_tokens, num_seqs, tiles, num_updates)

    def _graph_shapes(self) -> tuple[list[Shape], list[Shape]]:
        """(decodes alone, rounds with prefill), each by size. Steps widen with size, so that padding stays a small share."""
        sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, 513, 32), *range(576, self.max_seqs + 64, 64)]
        decodes = sorted({min(n, self.max_seqs) for n in sizes})
        updates = 64
        chunks = sorted(
            {
                min(n, self.max_tokens)
                for n in (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2304, 2560)
                if n <= MAX_GRAPH_CHUNK_TOKENS
            }
        )
        # Each for up to 256 sequences, and again for all seats: the head and the sampler run for every one there is room for.
        mixed = sorted({(n, min(n, self.max_seqs, seats)) for n in chunks for seats in (256, self.max_seqs)})
        return (
            [Shape(n, n, 0, max(updates, 2 * n)) for n in decodes],
            [Shape(n, seqs, self._most_tiles(n, 16), 1024) for n, seqs in mixed],
        )

    @torch.inference_mode()
    def _compile_kernels(self) -> None:
        """Have every kernel compiled that a round can meet, side by side, so that no round waits for one."""
        decodes, mixed = self._graph_shapes()
        shapes = [*decodes, *mixed]
        for num_tokens in {min(16, self.max_tokens), self.max_tokens}:
            num_seqs = min(num_tokens, self.max_seqs)
            exact = self._exact_shape(num_tokens, num_seqs, self._most_tiles(num_tokens, num_seqs), 64)
            shapes += [replace(exact, chunk_keys=keys) for keys in ("own", "fresh", "blocks")]
        self.inputs.zero_()  # counts of 0
        with compiling():
            for shape in shapes:
                self.forward.run(DeviceInputs.of(shape, self.inputs), layers=self._first_and_last)

    @torch.inference_mode()
    def _load_kernels(self, above: int) -> None:
        """Two layers of rounds without a graph, at sizes from `above` on: a kernel, the library's too, is loaded when it first runs, which
        takes the driver up to half a second."""
        self.inputs.zero_()
        for num_tokens in {*range(above + 1, self.max_tokens, 1024), self.max_tokens}:
            num_seqs = min(num_tokens, self.max_seqs)
            exact = self._exact_shape(num_tokens, num_seqs, self._most_tiles(num_tokens, num_seqs), 64)
            for keys in ("own", "fresh", "blocks"):
                self.forward.run(
                    DeviceInputs.of(replace(exact, chunk_keys=keys), self.inputs), layers=self._first_and_last
                )
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _capture_graphs(self) -> None:
        self.decode_shapes, self.mixed_shapes = self._graph_shapes()
        # The largest first: later ones fit into the memory that it took.
        self._capture([*reversed(self.mixed_shapes), *reversed(self.decode_shapes)])

    @torch.inference_mode()
    def _capture(self, shapes: Iterable[Shape]) -> None:
        for shape in shapes:
            inputs = self._inputs_for(shape)
            self.inputs.zero_()  # counts of 0: nothing is read or written while warming up
            self.forward.run(inputs, layers=self._first_and_last)  # a kernel that is not loaded yet cannot be captured
            torch.cuda.synchronize(self.model.device)
            graph = torch.cuda.CUDAGraph()
            # Collectives' own threads look at the device meanwhile: only this thread is watched then.
            strict = "global" if self.model.parallel.size == 1 else "thread_local"
            first = next(iter(self.graphs.values()), None)
            with torch.cuda.graph(graph, pool=first and first.pool(), capture_error_mode=strict):
                self.forward.run(inputs)
            self.graphs[shape] = graph
        torch.cuda.synchronize(self.model.device)

    def _sample_graphs(self) -> int:
        """Capture the largest graphs and some of the smallest, which have as many launches; -> bytes that the others will take.

        The largest take what all share. Each is run once, since the driver may allocate then only.
        """
        decodes, mixed = self._graph_shapes()
        largest = [mixed[-1], decodes[-1]]
        small = [shape for shape in (*mixed[:2], *decodes[:3]) if shape not in largest]
        used = []
        for shapes in (largest, small):
            self._capture(shapes)
            for shape in shapes:
                self.graphs[shape].replay()
            torch.cuda.synchronize(self.model.device)
            used.append(-card_memory(self.model.device)[0])
        others = len(decodes) + len(mixed) - len(largest) - len(small)
        return -(-max(used[1] - used[0], 0) * others // max(len(small), 1))

    def _inputs_for(self, shape: Shape) -> DeviceInputs:
        if shape not in self.device_inputs:
            self.device_inputs[shape] = DeviceInputs.of(shape, self.inputs)
        return self.device_inputs[shape]

    def _choose_shape(self, num_tokens: int, num_seqs: int, tiles: int, num_updates: int) -> Shape:
        """The smallest captured shape that holds the round, or its own."""
        for shape in self.decode_shapes if tiles == 0 else self.mixed_shapes:
            if (
                shape.num_tokens >= num_tokens
                and shape.num_seqs >= num_seqs
                and shape.chunk_tiles >= tiles
                and shape.num_updates >= num_updates
            ):
                return shape
        return self._exact_shape(num_tokens, num_seqs, tiles, num_updates)

    # -- a round

    def launch(self, batch: ScheduledBatch) -> PendingRound:
        """Start a round. The batch is not looked at after it returns."""
        return self.start(self.prepare(batch))

    def prepare(self, batch: ScheduledBatch) -> PreparedRound:
        """Lay out a round's inputs on the host; the device learns nothing yet. Rounds are started in the order of this."""
        began = time.perf_counter()
        inputs = gather(batch, self.model.config.vocab_size)
        rows, updates = self.rows.rows_and_updates(batch)
        tiles = chunk_tiles(inputs, self.forward.tokens_per_tile)
        num_updates = sum(len(blocks) for _, _, blocks in updates)
        shape = self._choose_shape(len(inputs.token_ids), batch.num_seqs, len(tiles[0]), num_updates)
        if shape not in self.graphs and len(tiles[0]):
            chunk_keys = inputs.chunk_keys if self.forward.own is not None else "blocks"
            if chunk_keys == "blocks":
                tiles = chunk_tiles(inputs, self.forward.tokens_per_paged_tile)
            shape = replace(
                shape, chunk_tiles=len(tiles[0]), chunk_keys=chunk_keys, singles=bool((batch.num_tokens == 1).any())
            )
        flight = self.flights[self.next_flight]
        self.next_flight = (self.next_flight + 1) % IN_FLIGHT
        if flight.done is not None:
            flight.done.synchronize()
        write(flight.inputs.numpy()[: shape.size], shape, inputs, rows, tiles, updates, batch, self.seed)
        watched = None if self.watch is None else self.watch.rows(batch)
        return PreparedRound(
            shape, flight, inputs, batch.num_seqs, watched, time.perf_counter() - began, shape not in self.graphs
        )

    @torch.inference_mode()
    def start(self, prepared: PreparedRound) -> PendingRound:
        """Hand a prepared round to the device."""
        began = time.perf_counter()
        shape, flight, inputs, watched = prepared.shape, prepared.flight, prepared.inputs, prepared.watched
        want_logits = self.return_logits or watched is not None
        logits: Tensor | None = None
        try:
            if self.model.team is not None:
                values = flight.inputs.numpy()[: shape.size].tobytes()
                self.model.team.round((shape, len(inputs.yielding), values, want_logits))
            mode, events = self._start(shape, flight, len(inputs.yielding))
            if want_logits:
                logits = self._gathered_logits(len(inputs.yielding))
            if watched is not None:
                assert self.watch is not None
                self.watch.keep(watched, logits, self.forward.tokens)
        except (RuntimeError, MemoryError) as error:
            if self.model.team is not None:
                self.model.team.explain(error)
            if not is_out_of_memory(error):
                raise
            raise forward_out_of_memory(
                self.model,
                len(inputs.token_ids),
                prepared.num_seqs,
                int((inputs.start + inputs.num_tokens).max()),
                cache_tokens=self.limits.num_blocks * self.limits.block_size,
                has_buffers=True,
            ) from None
        flops, num_bytes = self.work.of_round(
            len(inputs.token_ids), len(inputs.yielding), inputs.context_pairs, inputs.context_tokens
        )
        return PendingRound(
            flight=flight,
            num_yields=len(inputs.yielding),
            padded_tokens=shape.num_tokens,
            mode=mode,
            prepare_s=prepared.prepare_s,
            events=events,
            forward_s=None if events else time.perf_counter() - began,
            logits=logits.float().clone() if logits is not None and self.return_logits else None,
            flops=flops,
            bytes=num_bytes,
        )

    @torch.inference_mode()
    def follow(self, announced: tuple[Shape, int, bytes, bool]) -> None:
        """This rank's part of a round that rank 0 announced."""
        shape, num_yields, values, want_logits = announced
        flight = self.flights[self.next_flight]
        self.next_flight = (self.next_flight + 1) % IN_FLIGHT
        if flight.done is not None:
            flight.done.synchronize()
        flight.inputs.numpy()[: shape.size] = np.frombuffer(values, dtype=np.int32)
        self._start(shape, flight, num_yields)
        if want_logits:
            self._gathered_logits(num_yields)

    def _gathered_logits(self, num_yields: int) -> Tensor:
        """[yields, vocab] of the round just launched, of all ranks; a view where there is one."""
        return self.model.parallel.gather_vocab(self.forward.logits[:num_yields], self.model.config.vocab_size)

    def _start(
        self, shape: Shape, flight: Flight, num_yields: int
    ) -> tuple[str, tuple[torch.cuda.Event, torch.cuda.Event] | None]:
        on_card = self.model.device.type == "cuda"
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if on_card else None
        if events:
            events[0].record()
        self.inputs[: shape.size].copy_(flight.inputs[: shape.size], non_blocking=True)
        graph = self.graphs.get(shape)
        if graph is not None:
            graph.replay()
        else:
            self.forward.run(DeviceInputs.of(shape, self.inputs), self.layers)
        if events:
            events[1].record()
        flight.tokens[:num_yields].copy_(self.forward.tokens[:num_yields], non_blocking=True)
        if events:
            flight.done = torch.cuda.Event()
            flight.done.record()
        return "graph" if graph is not None else "eager", events

    def collect(self, handle: PendingRound) -> StepResult:
        """Wait for a round's tokens."""
        device_s = handle.forward_s
        if handle.events is not None:
            assert handle.flight.done is not None
            if self.model.team is not None:
                self.model.team.wait(handle.flight.done)
            handle.flight.done.synchronize()
            device_s = handle.events[0].elapsed_time(handle.events[1]) * 1e-3
        return StepResult(
            token_ids=handle.flight.tokens[: handle.num_yields].numpy().astype(np.int64),
            device_s=device_s,
            duration_s=device_s,
            mode=handle.mode,
            padded_tokens=handle.padded_tokens,
            prepare_s=handle.prepare_s,
            flops=handle.flops,
            bytes=handle.bytes,
        )

    def close(self) -> None:
        """Give the memory back. Rounds that were launched have to be collected before."""
        if self.model.team is not None:
            self.model.team.release()
        self.graphs = {}
        self.device_inputs = {}
        self.inputs = self.block_tables = torch.empty(0, dtype=torch.int32)
        self.k_cache = self.v_cache = torch.empty(0)
        self.forward = None  # type: ignore[assignment]
