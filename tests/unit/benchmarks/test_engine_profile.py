import pytest

from benchmarks.engine_profile import decode_parts_ms


def test_a_decode_step_is_divided_among_its_parts():
    spans = {
        "step": [(0.0, 5.0), (10.0, 18.0), (20.0, 28.0), (30.0, 38.0)],  # the first: prefill
        "backend": [(10.0, 16.0), (20.0, 26.0), (30.0, 36.0)],
        "kernel": [(11.0, 15.0), (21.0, 25.0), (31.0, 35.0)],
        "sample": [(4.0, 5.0), (16.0, 17.5), (26.0, 27.5), (36.0, 37.5)],
    }
    whole, kernel, backend, sampling, engine, between = decode_parts_ms(spans)
    assert (whole, kernel, backend, sampling) == pytest.approx((10e3, 4e3, 2e3, 1.5e3))
    assert (engine, between) == pytest.approx((0.5e3, 2e3))
