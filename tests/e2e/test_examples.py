"""The examples do what the README says of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE_TIMEOUT_S = 100

pytestmark = pytest.mark.e2e


def run(*arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=EXAMPLE_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_demo_prints_an_answer_and_a_receipt() -> None:
    out = run("examples/demo.py")
    assert "you    Tell me a story about a fox and a lantern." in out
    answer = out.split("model  ", 1)[1].split("receipt")[0]
    assert len(answer.split()) > 50
    receipt = out.split("receipt", 1)[1]
    moved = re.search(r"(\d+) blocks? of KV changed owner in [\d.]+ ms: no byte", receipt)
    assert moved is not None
    assert int(moved[1]) > 0
    assert "prefill-0" in receipt
    assert "decode-0" in receipt


def test_one_prompt_is_one_prompt_and_no_list_of_letters() -> None:
    out = run(
        "-c",
        "from neuron_di import LLM, SamplingParams\n"
        "greedy = SamplingParams(temperature=0, max_tokens=8)\n"
        "with LLM('examples/models/tiny-tales', threads=1) as llm:\n"
        "    first, = llm.generate('Once upon a time', greedy)\n"
        "    same, = llm.generate(['Once upon a time'], greedy)\n"
        "    ids, = llm.generate(first.prompt_ids, greedy)\n"
        "    assert llm.generate([], greedy) == []\n"
        "    print(first.text == same.text == ids.text, len(first.token_ids))",
    )
    assert out == "True 8\n"


def test_offline_example_equals_the_one_process_engine() -> None:
    prompt = "Once upon a time there was a small fox"
    out = run("examples/offline_di.py", "--prompt", prompt)
    whole = run(
        "-c",
        "from neuron_di import LLM, SamplingParams\n"
        "with LLM('examples/models/tiny-tales', threads=1) as llm:\n"
        f"    answer, = llm.generate([{prompt!r}], SamplingParams(temperature=0, max_tokens=80))\n"
        "    print(repr(answer.text))",
    )
    first = re.search(r"^prefill ('.*'|\".*\")$", out, re.MULTILINE)
    rest = re.search(r"^decode  ('.*'|\".*\")$", out, re.MULTILINE)
    assert first is not None
    assert rest is not None
    assert "handed over" in out
    joined = first[1][1:-1] + rest[1][1:-1]
    assert joined.replace("\\'", "'") == whole.strip()[1:-1].replace("\\'", "'")


def test_offline_example_ends_where_the_first_token_ends_an_answer() -> None:
    code = (
        "from neuron_di import LLM, SamplingParams\n"
        "greedy = SamplingParams(temperature=0, max_tokens=800)\n"
        "with LLM('examples/models/tiny-tales', threads=1) as llm:\n"
        "    tale, = llm.generate(['Once upon a time'], greedy)\n"
        "    print('Once upon a time' + tale.text, end='')"
    )
    whole = run("-c", code)
    out = run("examples/offline_di.py", "--prompt", whole, "--prompt", "Once upon a time")
    assert "prefill 0: " in out
    assert "the first token ended the answer" in out
    assert re.search(r"^decode  ''$", out, re.MULTILINE)
    assert re.search(r"^decode  1: pulled", out, re.MULTILINE)


def test_offline_example_waits_for_a_model_that_is_long_in_loading() -> None:
    code = (
        "import sys; sys.path.insert(0, 'examples')\n"
        "import offline_di\n"
        "offline_di.PEER_TIMEOUT_S = 0.01\n"  # of this process: the others load it anew
        "offline_di.main('examples/models/tiny-tales', ['Once upon a time'])"
    )
    assert re.search(r"^decode  '.+'$", run("-c", code), re.MULTILINE)


def test_offline_example_says_why_it_cannot_begin() -> None:
    ended = subprocess.run(
        [sys.executable, "examples/offline_di.py", "/no/such/model"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=EXAMPLE_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 1
    assert "prefill: model folder /no/such/model does not exist" in ended.stderr
    assert "the other process ended" in ended.stderr
    assert "Traceback" not in ended.stderr
