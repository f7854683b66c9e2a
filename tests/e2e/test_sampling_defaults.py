"""What a request leaves open is drawn as generation_config.json says, on two workers."""

import json
from pathlib import Path
from typing import Any

import pytest
from process_kit import running_fleet

from neuron_di.errors import CheckpointError
from neuron_di.llm import LLM
from neuron_di.testing import write_random_checkpoint
from neuron_di.wire import SamplingParams

pytestmark = pytest.mark.e2e

ASK: dict[str, Any] = {"seed": 3, "max_tokens": 12, "ignore_eos": True}
OPEN = {"temperature": None} | ASK  # else the kit's client asks for what is likeliest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("advised")
    write_random_checkpoint(folder, "llama")
    advise(folder, top_k=1, temperature=0.7)
    return folder


def advise(folder: Path, **defaults: Any) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | defaults))


@pytest.mark.asyncio(loop_scope="session")
async def test_the_model_decides_unless_a_client_or_an_operator_does(folder: Path) -> None:
    drawn = {"temperature": 1.0, "top_k": -1}
    async with running_fleet(folder) as client:
        open_answer = await client.ask("def f", **OPEN)
        greedy = await client.ask("def f", temperature=0, **ASK)
        own = await client.ask("def f", **drawn, **ASK)
        assert open_answer.text == greedy.text
        assert own.text != greedy.text
    async with running_fleet(folder, sampling_defaults="openai") as client:
        assert (await client.ask("def f", **OPEN)).text == own.text


def test_a_script_has_them_too(folder: Path) -> None:
    greedy = SamplingParams(temperature=0)
    with LLM(str(folder)) as llm:
        assert llm.generate("def f") == llm.generate("def f", greedy)
        assert llm.generate("def f")[0].text
    with LLM(str(folder), sampling_defaults="openai") as llm:
        texts = {llm.generate("def f")[0].text for _ in range(4)}
        assert len(texts) > 1


def test_what_no_request_could_have_is_refused_at_the_start(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama")
    advise(tmp_path, temperature=-1)
    with pytest.raises(CheckpointError, match="temperature"):
        LLM(str(tmp_path))
    LLM(str(tmp_path), sampling_defaults="openai").close()
