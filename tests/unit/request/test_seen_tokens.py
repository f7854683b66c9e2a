"""The ids that penalties look at: kept up token by token, the same as a count of all of them."""

from collections import Counter
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from neuron_di.request import Request
from neuron_di.request.seen_tokens import SeenTokens
from neuron_di.types import RequestId
from neuron_di.wire import SamplingParams

IDS = st.integers(0, 30)


def counted(seen):
    assert len(seen.generated_ids) == len(seen.counts)
    return dict(zip(seen.generated_ids.tolist(), seen.counts.tolist(), strict=True))


@given(prompt_ids=st.lists(IDS, max_size=60), pieces=st.lists(st.lists(IDS, max_size=40)))
def test_followed_in_pieces_of_any_size_they_are_those_of_all(prompt_ids, pieces):
    seen = SeenTokens(prompt_ids)
    generated = []
    for piece in pieces:
        generated += piece  # in pieces of one, of a few, or of a continuation's many
        seen.follow(generated)
        assert counted(seen) == Counter(generated)
        assert sorted(seen.ids.tolist()) == sorted(set(prompt_ids + generated))


class Read(list):
    """A list that counts what is read of it."""

    num_read = 0

    def __getitem__(self, which):
        found = super().__getitem__(which)
        self.num_read += len(found) if isinstance(which, slice) else 1
        return found

    def __iter__(self):
        self.num_read += len(self)
        return super().__iter__()


def test_each_token_is_read_once_however_long_the_answer_gets():
    seen = SeenTokens(range(1000))
    generated = Read()
    for token_id in range(5000):
        generated.append(token_id % 700)
        seen.follow(generated)
    assert generated.num_read == 5000
    assert sum(seen.counts) == 5000


def test_a_request_reads_its_prompt_once(monkeypatch):
    asked = []
    monkeypatch.setattr(
        np, "unique", lambda *a, unique=np.unique, **k: asked.append(a) or unique(*a, **k)
    )
    request = Request(
        RequestId("r"),
        0,
        prompt_ids=[3, 1, 3],
        sampling=SamplingParams(),
        max_tokens=99,
        output=cast("Any", None),
    )
    first = request.seen_tokens()
    num_asked = len(asked)
    for token_id in range(50):
        request.generated.append(token_id)
        assert request.seen_tokens() is first
    assert len(asked) == num_asked
    assert sorted(first.ids.tolist()) == list(range(50))
