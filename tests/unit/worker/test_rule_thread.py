import asyncio
import threading
from pathlib import Path

import pytest

from neuron_di.errors import BadRequest
from neuron_di.request import Tokenizer
from neuron_di.testing import write_random_checkpoint
from neuron_di.wire import Grammar, SamplingParams
from neuron_di.worker.rule_thread import RuleThread


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(folder / "llama", "llama")
    return Tokenizer.load(folder / "llama")


@pytest.fixture
def rules(tokenizer: Tokenizer) -> RuleThread:
    return RuleThread(tokenizer, num_vocab=tokenizer.num_vocab, eos_token_ids=(2,))


def rule_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rules")]


async def test_no_rules_take_no_thread_and_no_turn_of_the_loop(rules):
    before = rule_threads()
    turns = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    assert await rules.rules_of(SamplingParams()) is None
    assert turns == []
    assert rule_threads() == before


async def test_what_the_first_grammar_needs_can_be_made_before_it_comes(rules):
    made = vars(rules._maker._words)
    assert "for_grammars" not in made
    await rules.prepare()
    prepared = made["for_grammars"]
    await rules.rules_of(SamplingParams(grammar=Grammar(kind="json_object")))
    assert made["for_grammars"] is prepared


async def test_what_cannot_be_prepared_fails_nobody_but_who_asks_for_it(rules, monkeypatch):
    monkeypatch.setattr("llguidance.LLTokenizer", None)
    await rules.prepare()
    assert await rules.rules_of(SamplingParams(logit_bias=((5, 1.0),))) is not None
    with pytest.raises(BadRequest):
        await rules.rules_of(SamplingParams(grammar=Grammar(kind="json_object")))


async def test_the_loop_goes_on_while_a_grammar_is_compiled(rules, monkeypatch):
    """They are made one after the other, on one thread that is not the loop's."""
    may_go = threading.Event()
    has_begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    makers = []
    make = rules._maker.rules_of

    def slow(params: SamplingParams):
        makers.append(threading.current_thread())
        loop.call_soon_threadsafe(has_begun.set)
        may_go.wait(30)
        return make(params)

    monkeypatch.setattr(rules._maker, "rules_of", slow)
    params = SamplingParams(grammar=Grammar(kind="json_object"))
    pending = [asyncio.create_task(rules.rules_of(params)) for _ in range(2)]
    await has_begun.wait()
    assert not any(task.done() for task in pending)
    may_go.set()
    made = await asyncio.gather(*pending)
    assert all(each.grammar is not None for each in made)
    assert len(set(makers)) == 1
    assert makers[0] is not threading.current_thread()


async def test_a_refusal_reaches_the_caller(rules):
    params = SamplingParams(grammar=Grammar(kind="json_schema", value='{"not": {}}'))
    with pytest.raises(BadRequest, match="not supported: not"):
        await rules.rules_of(params)
    with pytest.raises(BadRequest, match="logit_bias: a token's id must be"):
        await rules.rules_of(SamplingParams(logit_bias=((10_000, 1.0),)))
