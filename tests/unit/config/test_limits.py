"""Every deadline and bound of the system is an option like any other, with sane bounds."""

import dataclasses

import pytest

from neuron_di.config import (
    FlagParser,
    HandOverOptions,
    LimitOptions,
    ProxyOptions,
    ServeOptions,
    WorkerOptions,
    add_flags,
    flags_of,
    load_options,
)
from neuron_di.config.option import specs_of
from neuron_di.errors import ConfigError

LIMITS = {
    key: (options_class, spec)
    for options_class in (LimitOptions, HandOverOptions)
    for key, spec in specs_of(options_class).items()
    if key not in ("signal_curve", "stream_layers")  # how they talk, not for how long
}
# A command that has each set, and what it cannot do without.
COMMANDS = {
    LimitOptions: ((ProxyOptions, {}), (ServeOptions, {"model": "m"})),
    HandOverOptions: (
        (WorkerOptions, {"model": "m", "role": "prefill"}),
        (ServeOptions, {"model": "m"}),
    ),
}


def load(command, needed, toml_path):
    parser = FlagParser(prog="test")
    add_flags(parser, command)
    flags = parser.parse_args([])
    vars(flags).update(needed)
    return load_options(command, flags, {}, toml_path)


def part_of(options, options_class):
    return options.limits if options_class is LimitOptions else options.hand_over


@pytest.mark.parametrize("key", LIMITS)
def test_a_limit_is_a_number_with_a_lower_bound_a_default_and_words(key):
    _, spec = LIMITS[key]
    assert spec.kind in (int, float)
    assert not spec.hidden
    assert spec.at_least is not None
    assert spec.at_least >= 0
    assert spec.at_most is None or spec.at_most > spec.at_least
    if spec.is_optional:  # there is no "no limit": it follows from something else
        assert spec.default is None
        assert spec.default_text
    else:
        assert type(spec.default) is spec.kind
        assert spec.at_least <= spec.default <= (spec.at_most or spec.default)
    assert len(spec.help_text.split()) >= 5
    # The unit is in the name: seconds are _s, rates per second _per_s, counts _max, shares _share.
    units = ("_per_s", "_s", "_share") if spec.kind is float else ("_max",)
    assert key.endswith(units)
    if key.endswith("_s"):
        assert spec.help_text.startswith("bytes per" if key.endswith("_per_s") else "seconds")


@pytest.mark.parametrize("key", LIMITS)
def test_a_limit_at_its_bounds_is_taken_and_beyond_them_refused(key, tmp_path):
    options_class, spec = LIMITS[key]
    path = tmp_path / "site.toml"
    step = 1 if spec.kind is int else 0.001
    for bound, beyond in ((spec.at_least, -step), (spec.at_most, step)):
        if bound is None:
            continue
        for command, needed in COMMANDS[options_class]:
            path.write_text(f"{key} = {spec.kind(bound)}\n")
            loaded = part_of(load(command, needed, path), options_class)
            assert getattr(loaded, key) == bound
            path.write_text(f"{key} = {spec.kind(bound + beyond)}\n")
            with pytest.raises(ConfigError) as caught:
                load(command, needed, path)
            assert caught.value.param == key


@pytest.mark.parametrize("key", [key for key in LIMITS if LIMITS[key][1].kind is float])
@pytest.mark.parametrize("raw", ["nan", "inf", "-inf", "'soon'", "true"])
def test_a_deadline_is_a_finite_number(key, raw, tmp_path):
    options_class, _ = LIMITS[key]
    command, needed = COMMANDS[options_class][0]
    path = tmp_path / "site.toml"
    path.write_text(f"{key} = {raw}\n")
    with pytest.raises(ConfigError) as caught:
        load(command, needed, path)
    assert caught.value.param == key


def test_the_defaults_fit_together():
    limits, hand_over = LimitOptions(), HandOverOptions()
    assert hand_over.heartbeat_s * 3 <= hand_over.peer_silence_s  # two may be lost
    assert hand_over.heartbeat_s * 3 <= hand_over.kv_lease_s
    assert hand_over.peer_silence_s < hand_over.kv_lease_s <= hand_over.kv_lease_max_s
    assert hand_over.kv_lease_max_s <= limits.request_timeout_s
    # A copy has ended, or was given up, before the blocks that it reads are let go.
    assert hand_over.transfer_timeout_s < hand_over.quarantine_s
    assert hand_over.quarantine_s < 60  # promised: nothing is held longer when all is quiet
    assert limits.probe_interval_s * 2 <= limits.freeze_timeout_s <= 3.0
    assert limits.connect_timeout_s < limits.freeze_timeout_s
    assert limits.stall_timeout_s < limits.request_timeout_s


def test_a_transfer_gets_a_fixed_time_and_a_time_for_its_bytes():
    hand_over = HandOverOptions(transfer_timeout_s=2.0, transfer_bytes_per_s=1000.0)
    assert hand_over.transfer_deadline_s(0) == 2.0
    assert hand_over.transfer_deadline_s(500) == 2.5
    assert hand_over.transfer_deadline_s(10_000) == 12.0
    assert HandOverOptions().transfer_deadline_s(1 << 30) == pytest.approx(5 + (1 << 30) / 100e6)


def test_the_limits_reach_a_child_process_and_cannot_be_changed():
    hand_over = HandOverOptions(quarantine_s=3.5, remembered_max=99)
    worker = WorkerOptions(model="m", role="decode", hand_over=hand_over)
    parser = FlagParser(prog="test")
    add_flags(parser, WorkerOptions)
    passed_on = load_options(WorkerOptions, parser.parse_args(flags_of(worker)), {})
    assert passed_on.hand_over == hand_over
    with pytest.raises(dataclasses.FrozenInstanceError):
        hand_over.heartbeat_s = 5
