import argparse
import dataclasses
from pathlib import Path

import pytest

from neuron_di.config import (
    DoctorOptions,
    FlagParser,
    ProxyOptions,
    ServeOptions,
    WorkerOptions,
    add_flags,
    flags_of,
    load_options,
)
from neuron_di.config.option import ByteSize, specs_of
from neuron_di.config.options import OPTION_SETS
from neuron_di.errors import ConfigError
from neuron_di_bindings.cuda_runtime import PATH_VARIABLE


def parse(options_class, argv):
    parser = FlagParser(prog="test")
    add_flags(parser, options_class)
    return parser.parse_args(argv)


def load(options_class, argv=(), environ=None, toml=None):
    return load_options(options_class, parse(options_class, list(argv)), environ or {}, toml)


@pytest.fixture
def write(tmp_path):
    def write_toml(text):
        path = tmp_path / "site.toml"
        path.write_text(text)
        return path

    return write_toml


def test_defaults_need_only_the_model():
    options = load(ServeOptions, ["some/model"])
    assert options == ServeOptions(model="some/model")
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert options.engine.block_size == 16
    assert options.limits.requests_max is None, "it follows from the workers' slots"
    assert options.limits.choices_max == 8


def test_flag_goes_before_variable_goes_before_file_goes_before_default(write):
    toml = write("port = 1\nhost = 'in-file'\ndecode = 3\n")
    environ = {"NEURON_DI_PORT": "2", "NEURON_DI_HOST": "in-env", "PATH": "/bin"}
    options = load(ServeOptions, ["m", "--port", "4"], environ, toml)
    assert (options.port, options.host, options.decode, options.prefill) == (4, "in-env", 3, 1)


SAME_THING = {
    "port": ("9000", "9000", 9000),
    "kv_memory": ("2GiB", "'2GiB'", ByteSize(2 << 30)),
    "dtype": ("bfloat16", "'bfloat16'", "bfloat16"),
    "request_timeout_s": ("1.5", "1.5", 1.5),
    "context_tokens": ("4096", "4096", 4096),
    "model_name": ("tiny", "'tiny'", "tiny"),
}


@pytest.mark.parametrize("key", SAME_THING)
def test_the_three_sources_say_the_same(key, write):
    text, in_toml, value = SAME_THING[key]
    spec = specs_of(ServeOptions)[key]
    by_flag = load(ServeOptions, ["m", f"{spec.flag}={text}"])
    by_variable = load(ServeOptions, ["m"], {spec.variable: text})
    by_file = load(ServeOptions, ["m"], {}, write(f"{key} = {in_toml}\n"))
    assert by_flag == by_variable == by_file
    assert value in {getattr(o, key, None) for o in (by_flag, by_flag.engine, by_flag.limits)}


@pytest.mark.parametrize("flag", ["--prefill=2", "--decode=2", "--prefill-tp=1", "--decode-tp=2"])
def test_a_combined_worker_and_how_many_of_each_contradict_each_other(flag):
    with pytest.raises(ConfigError, match="--combined is one worker"):
        load(ServeOptions, ["m", "--combined", flag])


@pytest.mark.parametrize("flag", ["--transfer-port", "--nrt-control-port"])
def test_several_prefill_workers_cannot_have_one_port(flag):
    assert load(ServeOptions, ["m", f"{flag}=9000", "--decode=2"]).kv_transfer is not None
    with pytest.raises(ConfigError, match=f"{flag} is one port, and each of 2 prefill workers"):
        load(ServeOptions, ["m", f"{flag}=9000", "--prefill=2"])


@pytest.mark.parametrize(
    ("options_class", "arguments"), [(ServeOptions, ["m"]), (WorkerOptions, ["m", "--role=decode"])]
)
def test_a_pool_has_one_size(options_class, arguments):
    with pytest.raises(ConfigError, match="--num-blocks and --kv-memory size the same pool"):
        load(options_class, [*arguments, "--num-blocks=10", "--kv-memory=2GiB"])


def test_bools_and_lists_in_each_source(write):
    assert load(ServeOptions, ["m", "--combined"]).combined
    assert load(ServeOptions, ["m"], {"NEURON_DI_COMBINED": "yes"}).combined
    assert load(ServeOptions, ["m"], {}, write("combined = true")).combined
    assert not load(ServeOptions, ["m", "--no-combined"], {"NEURON_DI_COMBINED": "1"}).combined
    urls = ("http://127.0.0.1:1", "http://[::1]:2")
    text = ",".join(urls)
    assert load(ProxyOptions, ["--prefill-urls", text]).prefill_urls == urls
    assert load(ProxyOptions, [], {"NEURON_DI_PREFILL_URLS": text}).prefill_urls == urls
    toml = write('prefill_urls = ["http://127.0.0.1:1", "http://[::1]:2"]')
    assert load(ProxyOptions, [], {}, toml).prefill_urls == urls
    assert load(ProxyOptions, ["--prefill-urls="], {}, toml).prefill_urls == ()


def test_a_variable_of_the_bindings_is_no_unknown_one():
    of_bindings = {PATH_VARIABLE: "libcudart.so.12"}
    assert load(ServeOptions, ["m"], of_bindings) == load(ServeOptions, ["m"])


def test_none_takes_back_what_a_lower_source_said(write):
    toml = write("kv_memory = '1GiB'")
    assert load(ServeOptions, ["m"], {}, toml).engine.kv_memory == 1 << 30
    assert load(ServeOptions, ["m", "--kv-memory=none"], {}, toml).engine.kv_memory is None


def test_the_variable_names_the_file_too(write):
    path = write("port = 77")
    assert load(ServeOptions, ["m"], {"NEURON_DI_CONFIG": str(path)}).port == 77
    assert parse(ServeOptions, ["m", "--config", "x.toml"]).config == "x.toml"


def test_a_file_without_a_name_is_refused_and_not_passed_over():
    with pytest.raises(ConfigError, match="--config is empty"):
        load(ProxyOptions, [], {"NEURON_DI_CONFIG": "x.toml"}, "")
    assert load(ProxyOptions, [], {"NEURON_DI_CONFIG": ""}) == ProxyOptions()  # taken back


def test_one_file_serves_all_commands(write):
    toml = write("requests_max = 5\nrole = 'decode'\nprefill = 2\ndecode_batch = 4\nmodel = 'm'\n")
    assert load(ProxyOptions, [], {}, toml).limits.requests_max == 5
    assert load(WorkerOptions, [], {}, toml).engine.decode_batch == 4
    assert load(ServeOptions, [], {}, toml).prefill == 2
    environ = {"NEURON_DI_ROLE": "prefill", "NEURON_DI_PREFILL": "3"}
    assert load(ProxyOptions, [], environ) == ProxyOptions()


def test_a_key_has_one_type_and_form_everywhere():
    seen = {}
    for options_class in OPTION_SETS:
        for key, spec in specs_of(options_class).items():
            if options_class is DoctorOptions and key == "device":
                continue  # also those that nothing is served on
            meaning = (spec.kind, spec.is_optional, spec.form, spec.positional)
            assert seen.setdefault(key, meaning) == meaning, key


def test_every_default_is_allowed():
    for options in (
        ServeOptions(model="m"),
        ProxyOptions(),
        WorkerOptions(model="m", role="both"),
        DoctorOptions(),
    ):
        assert load(type(options), flags_of(options)) == options


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("prot = 1", ["'prot'", "'port'", "site.toml"]),
        ("kv_memroy = '1GiB'", ["'kv_memroy'", "'kv_memory'"]),
        ("[engine]\nblock_size = 16", ["'engine'", "without tables"]),
        ("port = ", ["site.toml", "not valid TOML"]),
        ("port = 1\nport = 2", ["site.toml", "not valid TOML"]),
        ("port = 'http'", ["port in site.toml", "a whole number from 0 to 65535", "'http'"]),
        ("port = true", ["port in site.toml", "True"]),
        ("port = 8000.0", ["port in site.toml", "8000.0"]),
        ("port = 70000", ["from 0 to 65535", "70000"]),
        ("combined = 1", ["combined in site.toml", "true or false"]),
        ("dtype = 'fp8'", ["dtype in", "one of auto, float32, bfloat16, float16", "'fp8'"]),
        ("device = 'tpu'", ["device in", "one of cpu, cuda, neuron", "'tpu'"]),
        ("kv_memory = '2 potatoes'", ["kv_memory in", "2GiB", "or none"]),
        ("kv_memory = -1", ["kv_memory in"]),
        ("request_timeout_s = nan", ["request_timeout_s in"]),
        ("request_timeout_s = inf", ["request_timeout_s in"]),
        ("request_timeout_s = 1979-05-27", ["request_timeout_s in"]),
        ("host = 5", ["host in", "a text"]),
        ("host = ' '", ["host in", "not empty"]),
        ("context_tokens = [1]", ["context_tokens in", "or none"]),
    ],
)
def test_wrong_file(toml, expected, write):
    path = write(toml)
    with pytest.raises(ConfigError) as caught:
        load(ServeOptions, ["m"], {}, path)
    message = str(caught.value).replace(str(path), "site.toml")
    assert all(part in message for part in expected), message


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"the configuration file .*absent\.toml: No such file"):
        load(ServeOptions, ["m"], {}, tmp_path / "absent.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(ServeOptions, ["m"], {}, binary)
    with pytest.raises(ConfigError, match="/dev/zero has more than"):
        load(ServeOptions, ["m"], {}, Path("/dev/zero"))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"NEURON_DI_PROT": "1"}, ["NEURON_DI_PROT", "NEURON_DI_PORT"]),
        ({"NEURON_DI_port": "1"}, ["NEURON_DI_port"]),
        ({"NEURON_DI_PORT": "x"}, ["NEURON_DI_PORT must be", "from 0 to 65535", "'x'"]),
        ({"NEURON_DI_PORT": ""}, ["NEURON_DI_PORT must be"]),
        ({"NEURON_DI_PORT": "9" * 5000}, ["NEURON_DI_PORT must be"]),
        ({"NEURON_DI_COMBINED": "maybe"}, ["NEURON_DI_COMBINED", "true or false"]),
        ({"NEURON_DI_REQUEST_TIMEOUT_S": "nan"}, ["NEURON_DI_REQUEST_TIMEOUT_S must be"]),
    ],
)
def test_wrong_environment(environ, expected):
    with pytest.raises(ConfigError) as caught:
        load(ServeOptions, ["m"], environ)
    assert all(part in str(caught.value) for part in expected), str(caught.value)


@pytest.mark.parametrize(
    ("argv", "param"),
    [
        (["--registry", "127.0.0.1:5"], "registry"),
        (["--registry", "tcp://*:5"], "registry"),
        (["--registry", "tcp://127.0.0.1:70000"], "registry"),
        (["--registry", "host"], "registry"),
        (["--role", "router"], "role"),
        (["--port=-1"], "port"),
        (["--model-name="], "model_name"),
        (["--worker-id=\u5de5"], "worker_id"),
        (["--worker-id=a b"], "worker_id"),
        (["--worker-id", "a\n"], "worker_id"),
        (["--worker-id", "a" * 65], "worker_id"),
    ],
)
def test_wrong_flag_names_the_flag(argv, param):
    with pytest.raises(ConfigError) as caught:
        load(WorkerOptions, ["m", "--role", "both", *argv])
    assert caught.value.param == param
    assert f"--{param.replace('_', '-')} must be" in str(caught.value)


def test_missing_options_are_named_with_each_way_to_give_them():
    with pytest.raises(ConfigError, match=r"give MODEL, set NEURON_DI_MODEL, or write model"):
        load(ServeOptions)
    with pytest.raises(ConfigError, match=r"give --role, set NEURON_DI_ROLE"):
        load(WorkerOptions, ["m"])


def test_a_model_is_named_as_it_is_given():
    with pytest.raises(ConfigError, match=r"^MODEL must be a text"):
        load(ServeOptions, [""])


def test_options_cannot_be_changed():
    options = load(ServeOptions, ["m"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.port = 5


def test_flags_of_another_parser_are_ignored():
    namespace = argparse.Namespace(command="serve", model="m", verbose=True)
    assert load_options(ServeOptions, namespace, {}).model == "m"
