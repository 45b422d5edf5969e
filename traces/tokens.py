"""Token ids of a trace's requests: equal prefixes have equal ids, others do not, on any machine and in any order.

A pure function of (trace, row): no state but small memos, no randomness, no Python `hash`. Ids that a trace gives are
passed through, text goes through the tokenizer, lengths become made ids (docs/traces.md, "How token ids are made"):

- A made piece (the block of a hash id, a segment, the unique rest of a prompt, a forced output) is a stream of 64-bit
  words, splitmix64 over a counter from a key that belongs to the piece, mapped without bias into the vocabulary.
- Its first two tokens, and further ones where two do not suffice, spell the piece's own number in base V. So two pieces
  differ from their start, not only in probability.

Knows no engine; the vocabulary is a number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from traces.errors import BenchctlError
from traces.load import Trace
from traces.request import Request

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

WIDE_RANGE = 2**63  # without a vocabulary ids lie in [reserved, 2**63)
MAX_TOKENS = 2**26  # of one request: 512 MiB of ids
MEMO_BYTES = 32 << 20
MEMO_TEXTS = 256
_GOLDEN = 0x9E3779B97F4A7C15
_NUMBER_BITS = 60  # a piece's number, above the 3 bits that say what kind of piece it is

# What a piece is. Part of every made id: never renumber.
HASH_ID, SEGMENT, UNIQUE, OUTPUT, NAMED_HASH_ID, NAMED_SEGMENT = range(6)


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, conversation: list[Any], **options: Any) -> Any: ...


class TokenMaker:
    """Makes the ids of requests of one trace for one vocabulary.

    `vocab_size`: made ids lie in [reserved, vocab_size), given ids must lie in [0, vocab_size). None: there is no
    vocabulary; made ids lie in [reserved, 2**63), given ones may be any 64-bit integers. `tokenizer` is needed for
    requests with text only. Memory: one request at a time, and 32 MiB of memo for chains of `carry`.
    """

    def __init__(
        self, trace: Trace, *, vocab_size: int | None, tokenizer: Tokenizer | None = None, reserved: int = 0
    ) -> None:
        self._trace = trace
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._range = TokenRange(reserved, WIDE_RANGE if vocab_size is None else vocab_size)
        self._block_size = trace.header.block_size
        self._by_session = trace.header.hash_scope == "session"
        salt = trace.header.salt
        self._salt = f"i{salt}" if isinstance(salt, int) else f"s{salt}"
        self._bases = [_digest(f"benchctl 1\0{self._salt}\0{kind}") for kind in range(6)]
        self._memo: OrderedDict[str, Int64Array] = OrderedDict()  # carry parents: id -> prompt + output
        self._memo_bytes = 0
        self._texts: OrderedDict[int, Int64Array] = OrderedDict()  # row -> ids of a text prompt

    @property
    def digits(self) -> int:
        """How many tokens from its start a made piece needs to differ from every other one of this trace."""
        largest = 2 ** (_NUMBER_BITS + 3)
        return next(n for n in range(1, 65) if self._range.size**n >= largest)

    def prompt_length(self, request: Request) -> int:
        """Tokens of the prompt. Raises BenchctlError for text without a tokenizer."""
        if request.input_length is not None:
            return request.input_length
        if request.prompt_token_ids is not None:
            return len(request.prompt_token_ids)
        return len(self._text_ids(request))

    def prompt_ids(self, request: Request) -> Int64Array:
        """int64 [prompt_length]. Raises BenchctlError."""
        return self.token_ids(request)[: self.prompt_length(request)].copy()

    def token_ids(self, request: Request) -> Int64Array:
        """int64 [prompt_length + output_length]: the prompt, then the outputs to force. The array is the caller's.

        Raises BenchctlError: an id outside the vocabulary, text without a tokenizer, more than 2**26 tokens, a carry of
        more tokens than its parent has.
        """
        # From the request up to an ancestor whose ids are at hand, then down again: chains may be long, so no recursion.
        # Only ancestors, read from the trace, are remembered: the caller may have cut the request's own output.
        chain = [request]
        while (carry := chain[-1].carry) is not None and carry.from_id not in self._memo:
            chain.append(self._trace.by_id(carry.from_id))
        ids = self._make(chain.pop(), None)
        while chain:
            child = chain.pop()
            assert child.carry is not None, child
            self._remember(child.carry.from_id, ids)
            ids = self._make(child, ids)
        return ids

    def _make(self, request: Request, parent: Int64Array | None) -> Int64Array:
        """`parent`: the ids it carries from; None: they are in the memo, or it carries nothing."""
        num_prompt = self.prompt_length(request)
        num_output = request.output_length
        assert num_output is not None, request
        if num_prompt + num_output > MAX_TOKENS:
            raise BenchctlError(
                f'request "{request.id}" has {num_prompt + num_output} tokens; ids are made for up to {MAX_TOKENS}',
                where=self._where(request),
                fix="check its lengths, or give the engine a pool or a model length that refuses it",
            )
        ids = np.empty(num_prompt + num_output, dtype=np.int64)
        self._fill_prompt(request, ids[:num_prompt], parent)
        if request.output_token_ids is not None:
            ids[num_prompt:] = self._given(request, request.output_token_ids[:num_output], "output_token_ids")
        else:
            ids[num_prompt:] = self._piece(OUTPUT, request.index, num_output)
        return ids

    def _fill_prompt(self, request: Request, ids: Int64Array, parent: Int64Array | None) -> None:
        if request.prompt_token_ids is not None:
            ids[:] = self._given(request, request.prompt_token_ids, "prompt_token_ids")
            return
        if request.input_length is None:
            ids[:] = self._text_ids(request)
            return
        at = 0
        if request.hash_ids is not None:
            self._fill_hash_blocks(request, ids)
            at = len(ids)
        for segment in request.segments or ():
            ids[at : at + segment.len] = self._shared_piece(SEGMENT, NAMED_SEGMENT, segment.id, segment.len)
            at += segment.len
        if request.carry is not None:
            if parent is None:
                self._memo.move_to_end(request.carry.from_id)
            source = self._memo[request.carry.from_id] if parent is None else parent
            at = request.carry.tokens
            if at > len(source):
                raise BenchctlError(
                    f'carry of {at} tokens from "{request.carry.from_id}", whose prompt and output have {len(source)}',
                    where=self._where(request, "carry"),
                    fix=f"carry at most {len(source)} tokens",
                )
            ids[:at] = source[:at]
        if at < len(ids):
            ids[at:] = self._piece(UNIQUE, request.index, len(ids) - at)

    def _fill_hash_blocks(self, request: Request, ids: Int64Array) -> None:
        assert request.hash_ids is not None
        size = self._block_size
        if self._by_session:
            # The same id in another session is another text; a row without a session is one by itself.
            scope = f"row {request.index}" if request.session is None else f"session {request.session}"
        else:
            scope = None
        num_full = len(ids) // size
        if num_full:
            keys, numbers = self._hash_keys(request.hash_ids[:num_full], scope)
            ids[: num_full * size].reshape(num_full, size)[:] = self._range.draw(keys, numbers, size)
        rest = len(ids) - num_full * size
        if rest:
            keys, numbers = self._hash_keys(request.hash_ids[num_full:], scope)
            ids[num_full * size :] = self._one(keys, numbers, rest)

    def _hash_keys(self, hash_ids: tuple[int | str, ...], scope: str | None) -> tuple[UInt64Array, UInt64Array]:
        """(key, number) of each block; `scope` None: the whole file."""
        if scope is None and all(type(id) is int and abs(id) < 2 ** (_NUMBER_BITS - 1) for id in hash_ids):
            values = np.array(hash_ids, dtype=np.int64)
            return _keys(self._bases[HASH_ID], values), _numbers(HASH_ID, values)
        pairs = [self._named(HASH_ID, NAMED_HASH_ID, id, scope) for id in hash_ids]
        return np.array([k for k, _ in pairs], dtype=np.uint64), np.array([n for _, n in pairs], dtype=np.uint64)

    def _named(self, kind: int, named_kind: int, id: int | str, scope: str | None = None) -> tuple[int, int]:
        """(key, number) of a shared piece. Small integers of the file's scope spell themselves, all else a digest."""
        if isinstance(id, int) and scope is None and abs(id) < 2 ** (_NUMBER_BITS - 1):
            value = np.array([id], dtype=np.int64)
            return int(_keys(self._bases[kind], value)[0]), int(_numbers(kind, value)[0])
        name = f"{'i' if isinstance(id, int) else 's'}{len(str(id))} {id} {scope or ''}"
        key = _digest(name, self._bases[named_kind])
        return key, (key >> (64 - _NUMBER_BITS) << 3) | named_kind

    def _shared_piece(self, kind: int, named_kind: int, id: int | str, length: int) -> Int64Array:
        key, number = self._named(kind, named_kind, id)
        return self._one(np.array([key], np.uint64), np.array([number], np.uint64), length)

    def _piece(self, kind: int, row: int, length: int) -> Int64Array:
        value = np.array([row], dtype=np.int64)
        return self._one(_keys(self._bases[kind], value), _numbers(kind, value), length)

    def _one(self, key: UInt64Array, number: UInt64Array, length: int) -> Int64Array:
        ids: Int64Array = self._range.draw(key, number, length)[0]
        return ids

    def _given(self, request: Request, given: Sequence[int], key: str) -> Int64Array:
        ids = np.array(given, dtype=np.int64)
        if self._vocab_size is not None:
            wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
            if len(wrong):
                raise BenchctlError(
                    f'request "{request.id}": token id {ids[wrong[0]]} at {key}[{wrong[0]}] is outside the vocabulary '
                    f"of {self._vocab_size}",
                    where=self._where(request, key),
                    fix=f"give ids from 0 to {self._vocab_size - 1}, or a model with a larger vocabulary",
                )
        return ids

    def _text_ids(self, request: Request) -> Int64Array:
        ids = self._texts.get(request.index)
        if ids is not None:
            self._texts.move_to_end(request.index)
            return ids
        key = "prompt" if request.prompt is not None else "messages"
        if self._tokenizer is None:
            raise BenchctlError(
                f'request "{request.id}" is text, and there is no tokenizer',
                where=self._where(request, key),
                fix="use --model with a folder that has a tokenizer, or give the trace token ids or lengths",
            )
        try:
            if request.prompt is not None:
                made = self._tokenizer.encode(request.prompt)
            else:
                made = self._tokenizer.apply_chat_template(
                    request.messages or [],
                    tools=request.tools,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                )
            made = [int(id) for id in made]
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise BenchctlError(
                f'the tokenizer refuses request "{request.id}": {reason}',
                where=self._where(request, key),
                fix=f"mend {key}, or use a model whose tokenizer takes it",
            ) from error
        if not made:
            raise BenchctlError(
                f'the {key} of request "{request.id}" has no tokens',
                where=self._where(request, key),
                fix="give it text",
            )
        ids = self._given(request, made, key)
        self._texts[request.index] = ids
        if len(self._texts) > MEMO_TEXTS:
            self._texts.popitem(last=False)
        return ids

    def _remember(self, id: str, ids: Int64Array) -> None:
        self._memo[id] = ids
        self._memo_bytes += ids.nbytes
        while self._memo_bytes > MEMO_BYTES and len(self._memo) > 1:
            self._memo_bytes -= self._memo.popitem(last=False)[1].nbytes

    def _where(self, request: Request, key: str | None = None) -> str:
        return f"{self._trace.path}, line {request.line}" + (f", key `{key}`" if key else "")


class TokenRange:
    """The ids [reserved, end) and how 64-bit words and numbers become ids."""

    def __init__(self, reserved: int, end: int) -> None:
        self.size = end - reserved
        if reserved < 0 or self.size < 2:
            raise BenchctlError(
                f"a vocabulary of {end} ids, {reserved} of them reserved, leaves {self.size} to make prompts of",
                fix="use a model with at least two ordinary token ids",
            )
        self.reserved = reserved
        self._rest = 2**64 % self.size

    def draw(self, keys: UInt64Array, numbers: UInt64Array, length: int) -> Int64Array:
        """int64 [len(keys), length]: for each key its stream, headed by the digits of its number, lowest first."""
        counters = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        words = _mix(keys[:, None] + counters)
        if self._rest:
            # The top 2**64 % size words would favour the lowest ids: draw them again.
            limit = np.uint64(2**64 - 1 - self._rest)
            while (above := words > limit).any():
                words[above] = _mix(words[above] + np.uint64(_GOLDEN))
        words %= np.uint64(self.size)
        left = numbers.copy()
        for digit in range(length):
            used = left > 0 if digit >= 2 else np.ones(len(left), dtype=bool)
            if not used.any():
                break
            words[used, digit] = left[used] % np.uint64(self.size)
            left //= np.uint64(self.size)
        return words.astype(np.int64) + self.reserved


def _mix(x: UInt64Array) -> UInt64Array:
    """splitmix64's finalizer, a bijection of 64-bit words (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(base: int, values: Int64Array) -> UInt64Array:
    """A key for each value, different for different values."""
    return _mix(_mix(values.astype(np.uint64)) ^ np.uint64(base))


def _numbers(kind: int, values: Int64Array) -> UInt64Array:
    """What the first tokens spell: the value, signs folded in, and the kind of piece in the lowest 3 bits."""
    folded = (values << 1) ^ (values >> 63)
    return (folded.astype(np.uint64) << np.uint64(3)) | np.uint64(kind)


def _digest(text: str, seed: int = 0) -> int:
    # surrogatepass cannot be needed: JSON text with half a pair is refused on load.
    return int(xxhash.xxh3_64_intdigest(text.encode("utf-8"), seed=seed))
