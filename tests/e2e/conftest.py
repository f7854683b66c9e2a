"""Checkpoints, and the fleets that several files share."""

import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from openai_kit import Client
from oracle_kit import Oracle
from process_kit import running_fleet

from neuron_di.llm import LLM
from neuron_di.testing import write_random_checkpoint


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Whatever a test does, every process it started is gone at the end."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [
        process
        for process in psutil.Process().children()
        # Python's own helper of multiprocessing lives as long as the test run.
        if process not in before and "resource_tracker" not in " ".join(process.cmdline())
    ]
    for process in left:
        process.kill()
    assert left == []


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny random checkpoint of a family, made at its first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder_of(family: str) -> Path:
        folder = root / f"tiny-{family}"
        if not folder.exists():
            write_random_checkpoint(folder, family)
        return folder

    return folder_of


@pytest.fixture(scope="session")
def llama(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="session")
def tiny_tales() -> Path:
    """The model that is shipped. Its chat template takes no tools."""
    return Path(__file__).parents[2] / "examples/models/tiny-tales"


@pytest.fixture(scope="session")
def tool_tales(tiny_tales: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template that shows tools and their calls, in no format known here."""
    folder = tmp_path_factory.mktemp("tools") / "tool-tales"
    shutil.copytree(tiny_tales, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    head, content, rest = config["chat_template"].partition("{{ message['content'] | trim }}")
    names = "{{ '<|system|>' + tools | map(attribute='function.name') | join(' ') + '<|end|>' }}"
    tools = "{%- if tools -%}" + names + "{%- endif -%}"
    calls = "{%- if message.tool_calls -%}{{ message.tool_calls | tojson }}{%- endif -%}"
    config["chat_template"] = tools + head + content + calls + rest
    path.write_text(json.dumps(config), "utf-8")
    return folder


@pytest.fixture(scope="session")
def oracle(llama: Path) -> Oracle:
    """Hugging Face on the same checkpoint."""
    return Oracle(llama)


@pytest.fixture(scope="session")
def llama_llm(llama: Path) -> Iterator[LLM]:
    """The one-process engine on the same checkpoint."""
    with LLM(str(llama), threads=1) as llm:
        yield llm


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llama_1p1d(llama: Path) -> AsyncIterator[Client]:
    async with running_fleet(llama) as client:
        yield client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llama_combined(llama: Path) -> AsyncIterator[Client]:
    async with running_fleet(llama, combined=True) as client:
        yield client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny_tales_1p1d(tiny_tales: Path) -> AsyncIterator[Client]:
    async with running_fleet(tiny_tales) as client:
        yield client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tool_tales_1p1d(tool_tales: Path) -> AsyncIterator[Client]:
    async with running_fleet(tool_tales) as client:
        yield client
