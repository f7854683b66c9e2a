"""How old a request is on a worker, which decides who starts first and who gives way last."""

import asyncio

from worker_kit import collect, decode_leg, prefill_leg


async def test_whose_time_is_over_sooner_is_older_on_each_worker(prefill, decode, monkeypatch):
    """So a later attempt, which has what is left of its request's time, is as old as that."""
    ages = {}

    def note_ages(engine, role):
        submit = engine.submit

        def noted(request):
            ages[role, request.request_id] = request.age_order
            submit(request)

        monkeypatch.setattr(engine, "submit", noted)

    note_ages(prefill.prefill._engine, "prefill")
    note_ages(decode.decode.engine, "decode")
    for name, timeout_s in (("younger", 30.0), ("older", 20.0)):
        leg = prefill_leg(name, timeout_s=timeout_s)
        rest = decode_leg(name, prefill, timeout_s=timeout_s)
        await asyncio.gather(collect(prefill.prefill.run(leg)), collect(decode.decode.run(rest)))
    assert len(ages) == 4
    for role in ("prefill", "decode"):
        assert ages[role, "older"] < ages[role, "younger"]
