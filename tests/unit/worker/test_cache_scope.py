"""The scope within which a request's KV may be shared, from its leg to the engine."""

import asyncio

from msgspec.structs import replace
from worker_kit import collect, decode_leg, prefill_leg, token_ids

from neuron_di.wire import encode_json, prefill_leg_decoder


def leg_of(name, cache_scope):
    """As it comes out of the wire."""
    leg = replace(prefill_leg(name), cache_scope=cache_scope)
    return prefill_leg_decoder.decode(encode_json(leg))


def note_scopes(engine, monkeypatch):
    """The scope of each request that the engine gets, by its id."""
    scopes, submit = {}, engine.submit

    def noted(request):
        scopes[request.request_id] = request.cache_scope
        submit(request)

    monkeypatch.setattr(engine, "submit", noted)
    return scopes


async def test_a_request_has_the_scope_of_its_leg_and_is_served_alike(prefill, decode, monkeypatch):
    scopes = note_scopes(prefill.prefill._engine, monkeypatch)
    answers = []
    for name, cache_scope in (("of-alice", "alice"), ("of-bob", "bob"), ("of-nobody", "")):
        first, rest = await asyncio.gather(
            collect(prefill.prefill.run(leg_of(name, cache_scope))),
            collect(decode.decode.run(decode_leg(name, prefill))),
        )
        answers.append(token_ids(first + rest))
    assert scopes == {"of-alice": "alice", "of-bob": "bob", "of-nobody": ""}
    assert len(answers[0]) == 12
    assert answers == [answers[0]] * 3


async def test_a_worker_that_does_both_has_it_too_and_logs_it_nowhere(workers, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    both = workers.start("both")
    scopes = note_scopes(both.combined._engine, monkeypatch)
    await collect(both.combined.run(leg_of("r", "canary-scope")))
    assert scopes == {"r": "canary-scope"}
    assert "canary-scope" not in str([vars(record) for record in caplog.records])


def test_a_leg_that_names_no_scope_has_none():
    document = encode_json(prefill_leg("r"))
    assert b"cache_scope" not in document
    assert prefill_leg_decoder.decode(document).cache_scope == ""
