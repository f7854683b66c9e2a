"""What a request counts where tenants compete."""

import asyncio

import pytest
from request_bodies import CHOICES_MAX, chat, completion
from running_proxy import AT_ONCE, ListDirectory
from scripted_worker import make_record

from neuron_di.config import ProxyOptions
from neuron_di_proxy.admission import Ticket
from neuron_di_proxy.client_request import COUNTED_TOKENS_MAX, UNLIMITED_TOKENS
from neuron_di_proxy.fair_queue import FairQueue
from neuron_di_proxy.quart_reply import QuartReply
from neuron_di_proxy.request_fields import INT64_MAX
from neuron_di_proxy.service import Service


@pytest.mark.parametrize(
    ("request_", "cost"),
    [
        (completion(prompt="x" * 398, max_tokens=5), 100 + 5),  # its quotes included
        (completion(prompt=["x" * 398, "x" * 398], n=3, max_tokens=5), 3 * 200 + 6 * 5),
        (completion(prompt="x" * 398), 100 + 16),
    ],
)
def test_prompts_and_answers_are_counted(request_, cost):
    assert request_.cost == cost


def test_an_answer_without_a_limit_counts_as_a_stated_number():
    limited, unlimited = chat(max_tokens=1), chat()
    assert unlimited.cost - limited.cost == UNLIMITED_TOKENS - 1


@pytest.mark.parametrize("max_tokens", [COUNTED_TOKENS_MAX + 1, 1 << 40, INT64_MAX])
def test_what_no_model_writes_is_not_counted(max_tokens):
    most = completion(max_tokens=COUNTED_TOKENS_MAX, n=2).cost
    assert completion(max_tokens=max_tokens, n=2).cost == most


def test_weights_hold_whatever_was_asked_for_before():
    """A flow's shares are differences of sums, of which floats keep the leading digits only."""
    queue = FairQueue()
    for _ in range(100):
        queue.pass_by("greedy", completion(max_tokens=INT64_MAX, n=CHOICES_MAX).cost, 1.0)
    cost = completion(max_tokens=7).cost
    for index in range(100):
        queue.put("heavy", ("heavy", index), cost, 9.0)
        queue.put("light", ("light", index), cost, 1.0)
    taken = [queue.take_first()[0] for _ in range(50)]
    assert (taken.count("heavy"), taken.count("light")) == (45, 5)


async def test_the_queue_goes_by_it(monkeypatch):
    costs = []

    def take(_, num_places, cost):
        costs.append((num_places, cost))

    monkeypatch.setattr(Ticket, "take", take)
    directory = ListDirectory([make_record("p1", "prefill")])  # of the request's model
    service = Service(ProxyOptions(limits=AT_ONCE), directory)
    exchange = service.open("completions", {})
    body = b'{"model": "tiny", "prompt": "%b", "max_tokens": 7, "n": 2}' % (b"x" * 38)
    answering = asyncio.create_task(exchange.answer(body, QuartReply(0)))
    await answering
    exchange.close()
    assert costs == [(2, 2 * 10 + 14)]
