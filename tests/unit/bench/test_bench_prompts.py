import json

import numpy as np
import pytest

from neuron_di.bench.prompts import Pieces, PromptMaker

IDS = Pieces.of_ids(range(100, 400))
BLOCK = 16


def maker(seed=0, **options):
    return PromptMaker(IDS, seed, block_tokens=BLOCK, **options)


def ids(made: bytes) -> list[int]:
    return json.loads(made)


def test_a_prompt_of_ids_is_as_long_as_asked_and_the_same_every_time():
    one = ids(maker().prompt(3, 50))
    assert len(one) == 50
    assert set(one) <= set(range(100, 400))
    assert one == ids(maker().prompt(3, 50))


def test_prompts_differ_by_index_seed_and_warm_up():
    made = [maker().prompt(3, 50), maker().prompt(4, 50), maker(seed=1).prompt(3, 50),
            maker().warm_up(3, 50)]  # fmt: skip
    assert len(set(made)) == 4
    assert len({tuple(ids(each)[:4]) for each in made}) == 4  # not even a block in common


def test_equal_hashes_are_equal_prefixes_and_different_ones_are_not():
    one = ids(maker().prompt(0, 60, np.array([5, 6, 7, 8])))
    other = ids(maker().prompt(1, 60, np.array([5, 6, 9, 10])))
    assert len(one) == len(other) == 60
    assert one[: 2 * BLOCK] == other[: 2 * BLOCK]
    assert one[2 * BLOCK : 2 * BLOCK + 4] != other[2 * BLOCK : 2 * BLOCK + 4]


def test_a_shorter_prompt_with_the_same_hashes_is_the_beginning_of_the_longer_one():
    hashes = np.array([5, 6, 7])
    assert ids(maker().prompt(0, 48, hashes))[:37] == ids(maker().prompt(1, 37, hashes))


def test_what_no_hash_names_is_the_requests_own():
    one, other = (ids(maker().prompt(index, 30, np.array([5]))) for index in (0, 1))
    assert one[:BLOCK] == other[:BLOCK]
    assert one[BLOCK:] != other[BLOCK:]


def test_blocks_of_a_scaled_trace_meet_at_the_same_places():
    scaled = PromptMaker(IDS, 0, block_tokens=2.4)
    one = ids(scaled.prompt(0, 12, np.array([1, 2, 3, 4, 5])))
    other = ids(scaled.prompt(1, 12, np.array([1, 2, 3, 4, 6])))
    assert one[:10] == other[:10]
    assert one != other


def test_a_shared_prefix_is_in_all_and_comes_before_the_blocks():
    shared = maker(shared_tokens=20)
    one, other = ids(shared.prompt(0, 50)), ids(shared.prompt(1, 50, np.array([1, 2])))
    assert one[:20] == other[:20]
    assert one[20:] != other[20:]
    assert ids(shared.prompt(2, 10)) == one[:10]


@pytest.mark.parametrize(("num_tokens", "num_words"), [(100, 45), (11, 1), (1, 1)])
def test_words_are_as_many_as_make_so_many_tokens(num_tokens, num_words):
    words = PromptMaker(Pieces.of_words(2.0, 10.0), 0)
    text = json.loads(words.prompt(0, num_tokens))
    assert len(text.split()) == num_words
