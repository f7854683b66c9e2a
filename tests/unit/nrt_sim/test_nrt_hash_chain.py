"""The simulator's model: its tokens and KV are as computed in Python, and every byte counts."""

import itertools

import pytest
from nrt_sim import neff
from nrt_sim.plain import SUCCESS
from nrt_sim.plain_chain import Chain
from nrt_sim.plain_models import (
    BAD_INPUT,
    OUT_OF_BOUNDS,
    UNSUPPORTED_NEFF_VERSION,
    PlainModels,
)

PROMPT = [7, 1, 4, 96]
SIZES = {
    "num_layers": 2,
    "num_slots": 4,
    "num_heads": 2,
    "max_length": 12,
    "head_elements": 5,  # rows of 10 bytes: no multiple of a word
    "vocabulary": 97,
}
TINY = {**SIZES, "num_layers": 1, "num_slots": 2, "head_elements": 2}


@pytest.fixture
def models(nrt):
    return PlainModels(nrt)


def chain_of(models, sizes=SIZES, **more):
    return Chain(models=models, sizes=sizes, **more)


def decode(chain, tokens, slot):
    """One step: the last of the tokens is the new one. Next token and partial."""
    status, next_tokens, partials = chain.run([(slot, len(tokens) - 1, tokens[-1:])], 1)
    assert status == SUCCESS
    return next_tokens[0], partials[0]


@pytest.mark.parametrize("has_transposed_keys", [False, True])
@pytest.mark.parametrize("dtype", [neff.DType.BFLOAT16, neff.DType.FP8_E4, neff.DType.FLOAT32])
def test_prefill_and_decode_are_as_computed_in_python(models, dtype, has_transposed_keys):
    sizes = {**SIZES, "dtype": dtype}
    chain = chain_of(models, sizes, has_transposed_keys=has_transposed_keys)
    tokens = [*PROMPT, chain.prefill(2, PROMPT)]
    for _ in range(3):
        tokens.append(decode(chain, tokens, 2)[0])
    assert tokens[len(PROMPT) :] == chain.expected.generate(PROMPT, 4)
    used = tokens[:-1]
    assert chain.kv(2, len(used)) == chain.expected.kv(used)
    _, partial = decode(chain, tokens, 2)
    assert partial == chain.expected.partial(chain.expected.kv(tokens))


def test_a_long_prompt_may_come_in_parts(models):
    chain = chain_of(models, bucket=3)
    tokens = [*PROMPT, 5, 6]
    for first in (0, 3):
        status, next_tokens, _ = chain.run([(1, first, tokens[first : first + 3])], 3)
        assert status == SUCCESS
    assert next_tokens == chain.expected.generate(tokens, 1)


def test_rows_are_independent(models):
    chain = chain_of(models)
    prompts = {3: [1, 2], 0: [3, 4, 5], 2: [6]}
    tokens = {slot: [*row, chain.prefill(slot, row)] for slot, row in prompts.items()}
    rows = [(slot, len(row) - 1, row[-1:]) for slot, row in tokens.items()]
    status, next_tokens, _ = chain.run(rows, 1)
    assert status == SUCCESS
    expected = [chain.expected.generate(row, 1)[0] for row in tokens.values()]
    assert next_tokens == expected


def test_every_byte_of_the_sequence_changes_what_comes_next(models):
    chain = chain_of(models, TINY)
    tokens = [*PROMPT[:2], chain.prefill(1, PROMPT[:2])]
    _, right = decode(chain, tokens, 1)
    seen = {right}
    places = itertools.product(range(2), range(2), range(2), range(2), range(2))
    for state, head, position, element, byte in places:
        offset = chain.place(state, 1, head, position, element) + byte
        before = models.read(chain.states[state], offset, 1)
        models.write(chain.states[state], offset, bytes([before[0] ^ 1]))
        seen.add(decode(chain, tokens, 1)[1])
        models.write(chain.states[state], offset, before)
    assert len(seen) == 1 + 2**5
    assert decode(chain, tokens, 1)[1] == right


def test_nothing_else_changes_it(models):
    chain = chain_of(models, TINY)
    tokens = [*PROMPT[:2], chain.prefill(1, PROMPT[:2])]
    _, right = decode(chain, tokens, 1)
    for state, tensor in enumerate(chain.states):
        for head in range(2):  # the other slot, and the places behind
            models.write(tensor, chain.place(state, 0, head, 0, 0), b"\xff" * 4 * 3)
            models.write(tensor, chain.place(state, 1, head, 3, 0), b"\xff" * 4 * 9)
    assert decode(chain, tokens, 1)[1] == right


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 1, 0, 0), (0, 1, 1, 0)),  # heads (state, slot, head, position)
        ((0, 1, 0, 0), (1, 1, 0, 0)),  # K and V
        ((0, 1, 0, 0), (2, 1, 0, 0)),  # layers
        ((0, 1, 0, 0), (0, 1, 0, 1)),  # positions
        ((0, 1, 0, 0), (0, 0, 0, 0)),  # slots
    ],
)
def test_rows_in_each_others_place_show(models, one, other):
    chain = chain_of(models)
    chain.prefill(0, PROMPT[::-1])
    tokens = [*PROMPT, chain.prefill(1, PROMPT)]
    _, right = decode(chain, tokens, 1)
    places = [(state, chain.place(state, *where, 0)) for state, *where in (one, other)]
    rows = [models.read(chain.states[state], offset, 10) for state, offset in places]
    for (state, offset), row in zip(places, reversed(rows), strict=True):
        models.write(chain.states[state], offset, row)
    assert decode(chain, tokens, 1)[1] != right


def test_ranks_have_the_kv_and_the_sum_of_one(models):
    whole = chain_of(models)
    ranks = [
        chain_of(models, {**SIZES, "num_heads": 1}, first_head=rank, vnc=rank) for rank in (0, 1)
    ]
    status, next_tokens, partials = whole.run([(0, 0, PROMPT)], 8)
    assert status == SUCCESS
    parts = [rank.run([(0, 0, PROMPT)], 8)[2][0] for rank in ranks]
    assert sum(parts) % 2**64 == partials[0]
    assert [whole.expected.next_token(parts)] == next_tokens
    heads = [[state[0] for state in rank.kv(0, 4)] for rank in ranks]
    assert [list(pair) for pair in zip(*heads, strict=True)] == whole.kv(0, 4)


# ---- Inputs that are refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ((0, 0, [97]), OUT_OF_BOUNDS),
        ((0, 0, [-1]), OUT_OF_BOUNDS),
        ((0, 12, [1]), OUT_OF_BOUNDS),
        ((0, -2, [1]), OUT_OF_BOUNDS),
        ((0, 10, [1, 2, 3]), OUT_OF_BOUNDS),
        ((4, 0, [1]), OUT_OF_BOUNDS),
        ((-2, 0, [1]), OUT_OF_BOUNDS),
        ((0, 0, []), BAD_INPUT),
        ((0, 0, [96]), SUCCESS),
        ((3, 11, [0]), SUCCESS),
    ],
)
def test_what_no_place_has_is_out_of_bounds(models, row, status):
    chain = chain_of(models)
    before = [chain.kv(slot, 12) for slot in range(4)]
    assert chain.run([(2, 0, [1]), row], 3)[0] == status
    is_unchanged = [chain.kv(slot, 12) for slot in range(4)] == before
    assert is_unchanged == (status != SUCCESS)  # all rows are checked before any is written


def test_two_rows_of_one_slot_are_refused(models):
    assert chain_of(models).run([(1, 0, [1]), (1, 1, [2])], 1)[0] == BAD_INPUT


@pytest.mark.parametrize("positions", [[0, 2, -1], [0, 0, -1], [-1, 0, 1], [0, -1, 1]])
def test_positions_ascend_and_are_padded_on_the_right(models, positions):
    chain = chain_of(models)
    with chain.bound([(0, 0, [1, 2, 3])], 3) as (model, inputs, outputs, _):
        tensor = models.found(inputs, "position_ids")
        content = b"".join(p.to_bytes(4, "little", signed=True) for p in positions)
        assert models.nrt_execute(model, inputs, outputs) == SUCCESS
        models.write(tensor, 0, content)
        assert models.nrt_execute(model, inputs, outputs) == BAD_INPUT


def container(**changed):
    return neff.hash_chain(**{**SIZES, **changed})


def small(alias_of_k="k", flags=neff.Flag.NONE, max_length=4, partial=neff.DType.UINT64):
    """One layer, slot, head and element, four positions."""

    def spec(name, dtype, *shape, alias=None):
        return neff.TensorSpec(name=name, dtype=dtype, shape=shape, alias=alias)

    row = [spec(name, neff.DType.INT32, 1, 1) for name in ("tokens", "positions")]
    keys, values = (spec(name, neff.DType.INT8, 1, 1, 4, 1, alias=name) for name in "kv")
    given = spec("k", neff.DType.INT8, 1, 1, 4, 1, alias=alias_of_k)
    return neff.container(
        neff.Program.HASH_CHAIN,
        [*row, spec("slots", neff.DType.INT32, 1), given, values],
        [spec("next", neff.DType.INT32, 1), spec("partials", partial, 1), keys, values],
        parameters=(9, max_length, 0),
        flags=flags,
    )


@pytest.mark.parametrize(
    "content",
    [
        container(vocabulary=0),
        container(vocabulary=1 << 31),
        container(num_tokens=13),
        container(head_elements=2049),
        container(num_slots=1025),
        small(alias_of_k=None),
        small(flags=neff.Flag.SEQ_IDS_MASK),  # there is no pad
        small(max_length=5),
        small(max_length=0),
        small(partial=neff.DType.INT64),
    ],
)
def test_a_chain_that_cannot_be_is_refused(models, content):
    assert models.load_status(container()) == SUCCESS
    assert models.load_status(small()) == SUCCESS
    assert models.load_status(content) == UNSUPPORTED_NEFF_VERSION


# ---- Garbage -------------------------------------------------------------------------------------


def changed_places(chain, before, after):
    """(slot, position) of every byte that differs."""
    num_positions = len(before[0][0][0]) // chain.expected.row_bytes
    return {
        (slot, position)
        for slot, position in itertools.product(range(len(before)), range(num_positions))
        for state, head in itertools.product(range(len(chain.states)), range(2))
        if _row(chain, before, slot, state, head, position)
        != _row(chain, after, slot, state, head, position)
    }


def _row(chain, kv, slot, state, head, position):
    size = chain.expected.row_bytes
    return kv[slot][state][head][position * size : (position + 1) * size]


def all_kv(chain):
    num_positions = 12 + (128 if chain.has_seq_ids_mask else 0)
    return [chain.kv(slot, num_positions) for slot in range(4)]


def test_a_bucket_is_written_whole(models):
    chain = chain_of(models)
    before = all_kv(chain)
    chain.prefill(1, PROMPT)
    changed = changed_places(chain, before, all_kv(chain))
    assert changed == {(1, position) for position in range(8)}
    before = all_kv(chain)
    assert chain.run([(1, 11, [3])], 8)[0] == SUCCESS
    changed = changed_places(chain, before, all_kv(chain))
    assert changed == {(1, position) for position in range(11, 19)}


def test_without_the_mask_idle_rows_write_into_idle_slots(models):
    chain = chain_of(models, has_seq_ids_mask=False)
    before = all_kv(chain)
    status, next_tokens, partials = chain.run([(1, 5, [3]), (-1, 0, []), (-1, 0, [])], 1)
    assert status == SUCCESS
    assert next_tokens[1:] == [-1, -1]
    assert partials[1:] == [0, 0]
    assert changed_places(chain, before, all_kv(chain)) == {(1, 5), (0, 5), (2, 5)}


def test_with_the_mask_idle_rows_write_into_the_pad(models):
    chain = chain_of(models)
    before = all_kv(chain)
    assert chain.run([(1, 5, [3]), (-1, 0, []), (-1, 0, [])], 1)[0] == SUCCESS
    assert changed_places(chain, before, all_kv(chain)) == {(1, 5), (0, 12), (2, 12)}


def test_there_may_be_more_idle_rows_than_idle_slots(models):
    chain = chain_of(models, TINY)
    num_bytes = models.nrt_tensor_get_size(chain.states[0])
    wholes = [models.allocated(2 * num_bytes) for _ in chain.states]
    chain.states = [models.sliced(whole, 0, num_bytes) for whole in wholes]
    behind = [models.read(whole, num_bytes, num_bytes) for whole in wholes]
    status, next_tokens, _ = chain.run([(1, 0, [3]), (-1, 0, []), (-1, 0, [])], 1)
    assert status == SUCCESS
    assert next_tokens == [*chain.expected.generate([3], 1), -1, -1]
    assert [models.read(whole, num_bytes, num_bytes) for whole in wholes] == behind
