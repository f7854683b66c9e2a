import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_di.config import ServeOptions
from neuron_di.config.option import specs_of
from neuron_di.config.value import parse_value
from neuron_di.errors import ConfigError

SPECS = specs_of(ServeOptions)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("1b", 1),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2gb", 2_000_000_000),
        ("1TiB", 1 << 40),
        ("1kB", 1000),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_value(SPECS["kv_memory"], text, "here") == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 GiB x", "1Gi", "1e3", "0", "٣GiB"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="here must be a size"):
        parse_value(SPECS["kv_memory"], text, "here")


JUNK = st.one_of(
    st.text(),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.lists(st.one_of(st.text(), st.integers()), max_size=3),
    st.dictionaries(st.text(), st.integers(), max_size=2),
    st.datetimes(),
)


@given(st.sampled_from(sorted(SPECS)), JUNK)
def test_junk_is_refused_or_within_bounds(key, raw):
    spec = SPECS[key]
    try:
        value = parse_value(spec, raw, "here")
    except ConfigError as error:
        complaint = error
    else:
        assert spec.at_least is None or value is None or value >= spec.at_least
        return
    assert complaint.param == key
    assert complaint.message.startswith("here must be ")


def test_a_name_that_is_no_text_is_refused_but_a_file_may_have_it():
    name = b"mod\xe8le".decode(errors="surrogateescape")  # as a Latin-1 terminal gives it
    for key in ("model", "model_name", "etcd"):
        with pytest.raises(ConfigError, match=r"here must be .* not .*\\udce8"):
            parse_value(SPECS[key], name, "here")
    assert parse_value(SPECS["api_keys"], name, "here") == name
