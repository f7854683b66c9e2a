"""A request that gives way ends with an error, and what it has so far is where another goes on."""

import pytest
from engine_kit import indices, of, token_ids

from neuron_di.engine import Broken, Ended
from neuron_di.errors import Preempted

PROMPTS = {name: range(60 + n, 71 + n) for n, name in enumerate("abcd")}
MAX_TOKENS = 40


def answers_alone(make_rig):
    alone = make_rig("both")
    for name, prompt in PROMPTS.items():
        alone.engine.submit(alone.request(name, prompt, max_tokens=MAX_TOKENS))
        alone.turn_until_idle()
    return {name: token_ids(of(alone.events, name)) for name in PROMPTS}


def test_all_answers_are_those_of_a_pool_with_room_for_all(make_rig):
    expected = answers_alone(make_rig)
    rig = make_rig("both", reserve=4, num_blocks=16)  # 64 positions, and 200 will be asked for
    given = {name: [] for name in PROMPTS}
    waiting, attempt, preempted = list(PROMPTS), 0, []

    def submit(name):
        fields = {"given": given[name], "max_tokens": MAX_TOKENS, "age_order": ord(name)}
        rig.engine.submit(rig.request(name, PROMPTS[name], attempt, **fields))

    for name in waiting:
        submit(name)
    for _ in range(600):
        for event in rig.turn():
            name = event.key[0]
            if isinstance(event, Broken):
                assert isinstance(event.error, Preempted)
                preempted.append(name)
                attempt += 1
                submit(name)
            elif isinstance(event, Ended):
                assert (event.reason, event.num_generated) == ("length", MAX_TOKENS)
                waiting.remove(name)
            else:
                assert event.token.index == len(given[name])
                given[name].append(event.token.token_id)
        if not waiting:
            break
    assert given == expected
    assert preempted
    assert "a" not in preempted  # it is the oldest
    num_times = {name: preempted.count(name) for name in PROMPTS}
    assert num_times["b"] <= num_times["c"] <= num_times["d"]  # who comes again is as old as before
    assert rig.blocks.num_free == 16


@pytest.mark.parametrize("role", ["both", "decode"])
def test_a_large_reserve_preempts_nobody(make_rig, role):
    rig = make_rig(role, reserve=MAX_TOKENS, num_blocks=16)
    for name, prompt in PROMPTS.items():
        make = rig.request if role == "both" else rig.received
        rig.engine.submit(make(name, prompt_ids=prompt, max_tokens=MAX_TOKENS))
    for _ in range(600):
        rig.turn()
        for name in list(rig.transfers):
            rig.complete(name)
        if all(
            of(rig.events, name)[-1:] and isinstance(of(rig.events, name)[-1], Ended)
            for name in PROMPTS
        ):
            break
    assert not [event for event in rig.events if isinstance(event, Broken)]
    for name in PROMPTS:
        first = 0 if role == "both" else 1
        assert indices(of(rig.events, name)) == list(range(first, MAX_TOKENS))


def test_on_a_decode_worker_the_youngest_goes_and_its_blocks_are_free(make_rig):
    rig = make_rig("decode", reserve=4, num_blocks=14)
    for name in "ab":
        rig.engine.submit(rig.received(name, prompt_ids=PROMPTS[name], max_tokens=MAX_TOKENS))
    rig.turn()
    for name in "ab":
        rig.complete(name)
    for _ in range(60):
        rig.turn()
    assert isinstance(of(rig.events, "a")[-1], Ended)
    broken = of(rig.events, "b")[-1]
    assert isinstance(broken, Broken)
    assert isinstance(broken.error, Preempted)
    assert rig.blocks.num_free == 14
