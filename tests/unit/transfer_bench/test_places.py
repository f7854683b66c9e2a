from neuron_di.transfer_bench.places import Places

SOURCES, BLOCKS = list(range(100, 140)), list(range(140, 180))


def test_chosen_blocks_are_each_ends_own_and_each_once():
    places = Places(SOURCES, BLOCKS)
    seen = set()
    for _ in range(20):
        choice = places.choose(10)
        assert len(set(choice.source_ids)) == len(set(choice.block_ids)) == 10
        assert set(choice.source_ids) <= set(SOURCES)
        assert set(choice.block_ids) <= set(BLOCKS)
        seen.add(tuple(choice.source_ids))
    assert len(seen) > 1


def test_contiguous_ones_lie_side_by_side_at_either_end():
    places = Places(SOURCES, BLOCKS)
    for _ in range(20):
        choice = places.choose(7, is_contiguous=True)
        for ids, owned in ((choice.source_ids, SOURCES), (choice.block_ids, BLOCKS)):
            assert ids == list(range(ids[0], ids[0] + 7))
            assert set(ids) <= set(owned)
    everything = places.choose(40, is_contiguous=True)
    assert (everything.source_ids, everything.block_ids) == (SOURCES, BLOCKS)


def test_blocks_that_were_exchanged_are_the_others_and_the_next_exchange_brings_them_back():
    places = Places(SOURCES, BLOCKS)
    there = places.choose_to_exchange(5)
    places.exchange(there)
    rest = places.choose(40)
    assert set(rest.source_ids) == (set(SOURCES) - set(there.source_ids)) | set(there.block_ids)
    assert set(rest.block_ids) == (set(BLOCKS) - set(there.block_ids)) | set(there.source_ids)
    back = places.choose_to_exchange(5)
    assert (back.source_ids, back.block_ids) == (there.block_ids, there.source_ids)
    places.exchange(back)
    everything = places.choose(40, is_contiguous=True)
    assert (everything.source_ids, everything.block_ids) == (SOURCES, BLOCKS)


def test_an_exchange_of_another_size_chooses_anew():
    places = Places(SOURCES, BLOCKS)
    there = places.choose_to_exchange(5)
    places.exchange(there)
    choice = places.choose_to_exchange(6)
    assert len(set(choice.source_ids)) == 6
