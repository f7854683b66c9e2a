"""A real engine with one request on the fake model, turned until the request has ended."""

from neuron_di.core import BlockPool, CombinedScheduler
from neuron_di.engine import Emitted, Ended, Engine
from neuron_di.request import OutputText, Request, resolve_max_tokens
from neuron_di.testing.fake_model import EOS_ID, FakeBackend, FakeTokenizer
from neuron_di.testing.reference_run import Answer
from neuron_di.testing.workload import CONTEXT_TOKENS
from neuron_di.types import Incarnation, RequestId


def answer_of_one_engine(prompt_ids, sampling, *, after_prefill=None):
    """The answer; `after_prefill` may touch the KV once the first token is there."""
    backend = FakeBackend(block_size=4, num_blocks=20, incarnation=Incarnation("one"))
    tokenizer = FakeTokenizer()
    scheduler = CombinedScheduler(
        BlockPool(20), block_size=4, batch_size=1, chunk_tokens=3, waiting_max=1, reserve_tokens=9
    )
    events = []
    engine = Engine(backend, scheduler, tokenizer, (EOS_ID,), sink=events.extend)
    request = Request(
        RequestId("r"),
        0,
        prompt_ids=list(prompt_ids),
        sampling=sampling,
        max_tokens=resolve_max_tokens(sampling, len(prompt_ids), CONTEXT_TOKENS),
        output=OutputText(
            tokenizer,
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        ),
    )
    engine.submit(request)
    while not any(isinstance(event, Ended) for event in events):
        has_worked = engine.turn(block=False)
        assert has_worked
        if after_prefill is not None and len(request.generated) == 1:
            after_prefill(backend, request)
    backend.close()
    *tokens, end = events
    assert all(isinstance(event, Emitted) for event in tokens)
    return Answer(tuple(e.token for e in tokens), end.reason, end.stop, end.text)
