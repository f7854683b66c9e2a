"""How old a request is on a worker, which decides who starts first and who gives way last."""

import asyncio

from msgspec.structs import replace
from worker_kit import collect, decode_leg, prefill_leg


async def test_who_waited_longer_is_older_on_each_worker(prefill, decode, monkeypatch):
    """So a later attempt is as old as its request, however much time anybody has left."""
    ages = {}

    def note_ages(engine, role):
        submit = engine.submit

        def noted(request):
            ages[role, request.request_id] = request.age_order
            submit(request)

        monkeypatch.setattr(engine, "submit", noted)

    note_ages(prefill.prefill._engine, "prefill")
    note_ages(decode.decode.engine, "decode")
    for name, waited_s, timeout_s in (("younger", 0.0, 20.0), ("older", 60.0, 30.0)):
        legs = prefill_leg(name), decode_leg(name, prefill)
        leg, rest = (replace(each, waited_s=waited_s, timeout_s=timeout_s) for each in legs)
        await asyncio.gather(collect(prefill.prefill.run(leg)), collect(decode.decode.run(rest)))
    assert len(ages) == 4
    for role in ("prefill", "decode"):
        assert ages[role, "older"] < ages[role, "younger"]
