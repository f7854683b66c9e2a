import json

import pytest

from neuron_di.errors import CheckpointError
from neuron_di.models import read_sampling_defaults
from neuron_di.wire import SamplingDefaults


def read(folder, **fields):
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return read_sampling_defaults(folder)


def test_what_the_makers_say_is_read(tmp_path):
    """The rest of the file is about other things."""
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    others = {"eos_token_id": [1, 2], "do_sample": True, "max_new_tokens": 7, "num_beams": "?"}
    assert read(tmp_path, **wanted, **others) == SamplingDefaults(**wanted)
    assert read(tmp_path, temperature=1, repetition_penalty=1.05, top_p=None).given() == {
        "temperature": 1.0,
        "repetition_penalty": 1.05,
    }
    assert read(tmp_path, top_k=-1).given() == {"top_k": 0}  # off, in a request, too


def test_what_is_not_said_has_no_default(tmp_path):
    assert read_sampling_defaults(tmp_path).given() == {}
    assert read(tmp_path).given() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -7),
        ("top_k", 10**30),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", [1]),
    ],
)
def test_what_no_request_could_have_is_refused(tmp_path, name, value):
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{name}.*openai"):
        read(tmp_path, **{name: value})
