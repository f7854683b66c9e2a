"""Bugs to plant, as in planted_bugs.py: in what is kept of prompts, and in how it is found."""

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

from planting import Plant, around, both, instead, nothing

from neuron_di.core import PrefillChunk, PrefixCache
from neuron_di.engine import engine
from neuron_di.request import Request
from neuron_di_proxy.tenant import Tenant


def _keys_of_pieces_alone(_real: Callable, self: PrefixCache, request: Request) -> list[bytes]:
    size = self._piece_tokens
    ends = range(size, request.num_prompt + 1, size)
    return [bytes(request.prompt_ids[end - size : end]) for end in ends]


def _keeping_replays(real: Callable, self: PrefixCache, chunk: PrefillChunk) -> object:
    request = chunk.request
    known = SimpleNamespace(
        prompt_ids=request.token_ids(0, request.num_prefilled),
        num_prompt=request.num_prefilled,
        cache_scope=request.cache_scope,
        piece_keys=None,
        block_ids=request.block_ids,
    )
    seen = SimpleNamespace(request=known, end=chunk.end, reused=chunk.reused, is_replay=False)
    return real(self, seen)


def _cut_at_blocks(real: Callable, self: PrefixCache, *args: object, **sizes: object) -> None:
    real(self, *args, **sizes | {"chunk_tokens": 1})


def _kept_uncopied(real: Callable, self: PrefixCache, chunk: PrefillChunk) -> tuple[list, list]:
    real(self, chunk)
    return [], []


def _kept_in_part(real: Callable, self: PrefixCache, chunk: PrefillChunk) -> tuple[list, list]:
    sources, targets = real(self, chunk)
    if len(targets) > 1:
        (piece,) = (each for each in self._pieces.values() if each == targets)
        self._pool.let_go([piece.pop()])
    return sources[: len(targets) - 1], targets[:-1]


def _found_uncopied(real: Callable, backend: object, prefixes: object, chunk: PrefillChunk, **_):
    return None if chunk.reused else real(backend, prefixes, chunk, **_)


def _found_to_the_end(_real: Callable, self: PrefixCache, request: Request) -> object:
    start, size = request.num_computed, self._piece_tokens
    index, rest = divmod(start, size)
    for key in self._keys(request)[index : index + 1]:
        if key in self._pieces and not rest:
            return PrefillChunk(request, start, start + size, tuple(self._pieces[key]))
    return None


def _forget_blocks_alone(real: Callable, self: PrefixCache, num_blocks: int) -> None:
    pieces = self._pieces.copy()
    real(self, num_blocks)
    self._pieces = pieces


PREFIX_BUGS: dict[str, Plant] = {
    "a piece's key forgets what comes before it": around(
        PrefixCache, "_keys", _keys_of_pieces_alone
    ),
    "pieces end where no chunk does": around(PrefixCache, "__init__", _cut_at_blocks),
    "KV of the decode kernel is kept": around(PrefixCache, "keep", _keeping_replays),
    "what is kept is not copied": around(PrefixCache, "keep", _kept_uncopied),
    "what is found is not copied": around(engine, "prefill", _found_uncopied),
    "pieces whose copy failed stay": both(
        instead(PrefixCache, "forget_piece", nothing),
        instead(PrefixCache, "forget_prompt", nothing),
    ),
    "a piece lacks a block": around(PrefixCache, "keep", _kept_in_part),
    "a whole prompt is found": around(PrefixCache, "next_of", _found_to_the_end),
    "kept blocks are taken, and their pieces stay": around(
        PrefixCache, "_forget", _forget_blocks_alone
    ),
    "nobody gets blocks that are kept": instead(PrefixCache, "_forget", nothing),
    "tenants share what is kept": lambda: mock.patch.object(
        Tenant, "cache_scope", property(lambda _: "")
    ),
}

PREFIX_MASKED: dict[str, tuple[Plant, str]] = {
    "a piece whose copy failed stays": (
        instead(PrefixCache, "forget_piece", nothing),
        "the step failed by that, and its prompt takes along what was kept of it",
    ),
    "a prompt whose step failed leaves its pieces": (
        instead(PrefixCache, "forget_prompt", nothing),
        "a piece whose copy failed is forgotten, and no fault here spoils KV that is kept",
    ),
}
