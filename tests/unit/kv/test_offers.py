"""What a block is offered for: written by one process while another reads it."""

from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest
from arena_kit import Scene, at_access, scene

from neuron_di.kv import ownership
from neuron_di.kv.arena import Arena, Offers
from neuron_di_bindings.owner_words import passed_to

PROMISED, OFFERED = [0, 1, 2], [6, 7, 8]


@pytest.fixture
def both() -> Iterator[Scene]:
    with scene() as made:
        yield made


def _watched_offers(arena: Arena, on_access: Callable[[str], None]) -> Offers:
    """The offers, of which each access to a column is announced before it is made."""

    class Column:
        def __init__(self, name: str) -> None:
            self.name, self.words = name, getattr(offers, name)

        def __getitem__(self, ids):
            on_access(f"read {self.name}")
            return self.words[ids]

        def __setitem__(self, ids, words):
            on_access(f"write {self.name}")
            self.words[ids] = words

    offers = arena.offers
    return Offers(*(Column(field.name) for field in fields(Offers)))


def test_an_offer_that_can_be_read_is_one_offer(both: Scene) -> None:
    both.promise([3, 4, 5])
    refused = both.group(OFFERED)
    both.prefill.retire()  # while it is being taken
    arena, seen = both.decode.pool.arena, []
    offers, names = arena.offers, [field.name for field in fields(Offers)]
    for name in names:
        getattr(offers, name)[OFFERED] = getattr(refused, "given" if name == "own" else "source")
    both.promise(PROMISED)

    def look(access: str) -> None:
        if access.startswith("write") and offers.own[OFFERED].any():
            seen.append(access)

    arena.offers = _watched_offers(arena, look)
    group = both.group(OFFERED)
    assert both.take(group) is None
    assert seen == ["write own"]  # the first: nothing else is written while it stands
    assert (offers.own[OFFERED] == group.given).all()


def test_an_offer_that_is_replaced_while_it_is_read_is_not_mended(both: Scene) -> None:
    """The one before was decided, the one that comes is not."""
    arena = both.decode.pool.arena
    for number in range(4):
        both.promise([3, 4])
        group = both.group([6, 7])
        offers = arena.offers
        arena.words.swap(group.source_ids[-1:], group.source[-1:], passed_to(group.source, 2)[-1:])
        offers.own[group.given_ids] = group.given
        for name in ("source_ids", "source"):
            getattr(offers, name)[group.given_ids] = getattr(group, name)
        offers.lead_ids[group.given_ids] = group.source_ids[-1]
        offers.lead[group.given_ids] = group.source[-1]
        before = arena.raw_words.copy()

        def replace_it(offers=offers, ids=group.given_ids, before=before) -> None:
            offers.own[ids] = 0
            offers.source_ids[ids] = [0, 1]
            offers.source[ids] = before[[0, 1]]

        steps = at_access(number, replace_it)
        arena.offers = _watched_offers(arena, lambda access, steps=steps: steps())
        ownership.mend(arena, group.given_ids)
        assert (arena.raw_words == before).all()
        arena.offers = offers
        arena.words.store(group.source_ids, group.source)
