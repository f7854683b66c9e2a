import re

import pytest

from neuron_di.config import (
    ByteSize,
    EngineOptions,
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
from neuron_di.config.options import OPTION_SETS
from neuron_di.errors import ConfigError


@pytest.fixture
def parser():
    parser = FlagParser(prog="neuron-di")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, options_class in (("serve", ServeOptions), ("worker", WorkerOptions)):
        add_flags(commands.add_parser(name), options_class)
    commands.add_parser("top").add_argument("--draw", choices=("all", "none"))
    return parser


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["serve", "m", "--prot", "1"], "unknown flag --prot; the nearest valid one is --port"),
        (["serve", "m", "--por=1"], "unknown flag --por; the nearest valid one is --port"),
        (["serve", "m", "--blok-size=1"], "the nearest valid one is --block-size"),
        (["serve", "--model", "m"], "serve: MODEL is given without --model"),
        (["worker", "--model=m"], "worker: MODEL is given without --model"),
        (["worker", "m", "--parent-pids=1"], "the nearest valid one is --"),
        (["serve", "m", "n"], "unexpected argument 'n'"),
        (["serve", "m", "--port"], "--port"),
        (["sreve", "m"], "unknown command 'sreve'; the nearest valid one is serve"),
        (["top", "--draw", "al"], "top: unknown --draw 'al'; the nearest valid one is all"),
        ([], "command"),
    ],
)
def test_complaints_are_config_errors(parser, argv, expected):
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(argv)
    assert expected in str(caught.value)
    assert "--parent-pid " not in f"{caught.value} "
    assert "neuron-di" not in str(caught.value)  # whoever shows it says so


def test_the_model_may_stand_anywhere(parser):
    for argv in (["m", "--port", "1"], ["--port", "1", "m"], ["--pin", "m", "--port=1"]):
        namespace = parser.parse_args(["serve", *argv])
        assert (namespace.model, namespace.port) == ("m", "1")


@pytest.mark.parametrize("options_class", OPTION_SETS)
def test_help_shows_every_option_with_words(options_class):
    parser = FlagParser(prog="test")
    add_flags(parser, options_class)
    text = parser.format_help()
    for spec in specs_of(options_class).values():
        assert (spec.flag in text or spec.positional) != spec.hidden, spec.key
        assert spec.help_text[0].islower() or spec.help_text.startswith(("HTTP", "CPU", "KV"))
        assert not spec.help_text.endswith("."), spec.key
        assert "none takes" not in spec.help_text, spec.key  # but as `default_text`


def test_help_calls_seconds_only_what_is_counted_in_them():
    parser = FlagParser(prog="neuron-di")
    add_flags(parser, ServeOptions)
    words = dict(re.findall(r"--(\S+) ([A-Z]+)", parser.format_help()))
    assert words["retry-share"] == words["transfer-bytes-per-s"] == "X"
    assert words["drain-timeout-s"] == "SECONDS"
    assert words["tls-cert"] == "FILE"
    assert words["host"] == "ADDRESS"


def test_help_says_every_default_as_it_would_be_written():
    parser = FlagParser(prog="neuron-di")
    add_flags(parser, ServeOptions)
    words = {action.dest: action.help for action in parser._actions}
    for spec in specs_of(ServeOptions).values():
        assert spec.hidden or spec.positional or "(default: " in words[spec.key], spec.key
    assert words["header_bytes_max"] == "size of a request's head (default: 16KiB)"
    assert words["drain_timeout_s"].endswith("at shutdown (default: 60)")
    assert words["transfer_bytes_per_s"].endswith("(default: 100000000)")
    assert words["model_name"].endswith("(default: the folder's name)")
    text = " ".join(parser.format_help().split())
    assert "--etcd HOST:PORT,...|auto addresses" in text


@pytest.mark.parametrize(
    "options",
    [
        ServeOptions(model="dir/with space", combined=True, limits=LimitOptions(requests_max=7)),
        ProxyOptions(prefill_urls=("http://127.0.0.1:1", "http://127.0.0.1:2")),
        WorkerOptions(
            model="m",
            role="decode",
            registry="tcp://127.0.0.1:5",
            core=0,
            parent_pid=12,
            hand_over=HandOverOptions(kv_lease_s=0.1 + 0.2 + 1, peers_max=7),
            engine=EngineOptions(kv_memory=ByteSize((1 << 40) + 1), dtype="float16"),
        ),
    ],
)
def test_flags_say_exactly_the_options(options):
    parser = FlagParser(prog="test")
    add_flags(parser, type(options))
    # A child must not take what was meant for its parent.
    environ = {"NEURON_DI_PORT": "9", "NEURON_DI_NUM_BLOCKS": "3", "NEURON_DI_LOG_LEVEL": "error"}
    assert load_options(type(options), parser.parse_args(flags_of(options)), environ) == options


def test_several_flags_of_a_list_are_one_list():
    parser = FlagParser(prog="neuron-di")
    add_flags(parser, ProxyOptions)
    argv = ["--decode-urls=http://a:1,http://b:2", "--decode-urls", "http://c:3", "--etcd", "d:4"]
    found = load_options(ProxyOptions, parser.parse_args([*argv, "--etcd", "e:5"]), {})
    assert found.decode_urls == ("http://a:1", "http://b:2", "http://c:3")
    assert found.etcd.etcd == ("d:4", "e:5")


def test_help_shows_lists_as_they_are_written():
    parser = FlagParser(prog="neuron-di")
    add_flags(parser, ServeOptions)
    text = " ".join(parser.format_help().split())
    assert "--transfer NAME,... what may move KV" in text
    assert "reached from others (default: auto)" in text
