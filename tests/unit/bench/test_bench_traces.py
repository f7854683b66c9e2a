import json
from pathlib import Path

import pytest

from neuron_di.bench.traces import read_trace
from neuron_di.errors import ConfigError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def write(tmp_path):
    def file_of(text: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return file_of


def line(at_ms: float, num_in: int, num_out: int, hash_ids: list[int] | None = None) -> str:
    fields = {"timestamp": at_ms, "input_length": num_in, "output_length": num_out}
    return json.dumps(fields | ({} if hash_ids is None else {"hash_ids": hash_ids})) + "\n"


def test_mooncake(write):
    trace = read_trace(write(line(500, 600, 9, [0, 7]) + "\n" + line(2500, 512, 3, [0])))
    assert trace.at_s.tolist() == [0, 2]
    assert trace.input_tokens.tolist() == [600, 512]
    assert trace.output_tokens.tolist() == [9, 3]
    assert [trace.hashes(i).tolist() for i in range(2)] == [[0, 7], [0]]


def test_requests_are_put_in_the_order_of_their_times_with_their_hashes(write):
    text = line(3000, 3, 1, [30]) + line(1000, 600, 2, [10, 11]) + line(2000, 2, 3, [20])
    trace = read_trace(write(text))
    assert trace.at_s.tolist() == [0, 1, 2]
    assert trace.output_tokens.tolist() == [2, 3, 1]
    assert [trace.hashes(i).tolist() for i in range(3)] == [[10, 11], [20], [30]]


def test_a_trace_without_hashes(write):
    trace = read_trace(write(line(0, 5, 5)))
    assert trace.hashes(0).tolist() == []


def test_a_last_block_that_is_not_full_may_have_no_hash(write):
    assert len(read_trace(write(line(0, 600, 1, [4])))) == 1


def test_other_block_sizes(write):
    path = write(line(0, 33, 1, [1, 2, 3]))
    assert len(read_trace(path, block_tokens=16)) == 1
    with pytest.raises(ConfigError, match=r"line 1: .*--trace-block-tokens"):
        read_trace(path)


def test_azure(write):
    rows = "2023-11-16 23:59:59.5000000,4808,10\n2023-11-17 00:00:01.7500000,0,0\n"
    trace = read_trace(write(HEADER + rows))
    assert trace.at_s.tolist() == pytest.approx([0, 2.25])
    assert trace.input_tokens.tolist() == [4808, 1]  # an empty prompt cannot be asked for
    assert trace.output_tokens.tolist() == [10, 1]


def test_azures_second_trace_says_its_zone_and_leaves_out_a_fraction_of_nothing(write):
    rows = "2024-05-10 00:00:03.500000+00:00,5,5\n2024-05-10 00:00:04+00:00,5,5\n"
    rows += "2024-05-10T00:00:05Z,5,5\n2024-05-09 22:00:05.250000-02:00,5,5\n"
    trace = read_trace(write(HEADER + rows))
    assert trace.at_s.tolist() == pytest.approx([0, 0.5, 1.5, 1.75])


def test_azure_columns_may_be_in_another_order_and_have_others_beside_them(write):
    text = "\ufeffid,GeneratedTokens,TIMESTAMP,ContextTokens\r\nx,3,2023-11-16 18:17:03,8\r\n"
    trace = read_trace(write(text))
    assert (trace.input_tokens[0], trace.output_tokens[0]) == (8, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (line(0, 1, 1) + "{\n", "line 2"),
        (line(0, 1, 1) * 3 + '{"timestamp": 1}\n', "line 4: .*input_length"),
        (line(0, 1, 1) + "\n" + '{"timestamp": "x", "input_length": 1}', "line 3"),
        (line(0, -1, 1), "line 1: .*counts"),
        (line(0, 1, 10**9), "line 1: .*counts"),
        (line(0, 1, 1, [1 << 70]), "line 1"),
        ('{"timestamp": 1e999, "input_length": 1, "output_length": 1}', "line 1"),
        (HEADER + "2023-11-16 18:17:03,5,5\nyesterday,5,5\n", "line 3"),
        (HEADER + "2023-11-16 18:17:03,five,5\n", "line 2"),
        (HEADER + "2023-11-16 18:17:03,5\n", "line 2: it has 2 columns"),
        (HEADER + "nan,5,5\n", "line 2: its time"),
        (HEADER + f'"{"x" * 140_000}",5,5\n', "line 2: field larger"),
        (HEADER, "no request"),
        (f'[{{"prompt": "{"x" * 140_000}"}}]', "no trace: line 1"),
        ("", "no trace: line 1"),
        ("TIMESTAMP,ContextTokens\n", "GeneratedTokens"),
        (b"\xff\xfe\x00", "UTF-8"),
        (line(0, 1, 1).encode() + b"\xff", "UTF-8"),
    ],
)
def test_a_bad_line_is_named(write, text, words):
    with pytest.raises(ConfigError, match=words):
        read_trace(write(text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")
