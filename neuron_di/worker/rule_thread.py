"""Token rules are made beside the event loop: a grammar may take a second to compile."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from neuron_di.request import (
    Tokenizer,
    TokenRuleMaker,
    TokenRules,
    has_token_rules,
)
from neuron_di.wire import SamplingParams
from neuron_di.wire.sampling_rules import check_sampling


class RuleThread:
    """One worker's maker of rules and the one thread that it runs on.

    One: requests with large grammars wait for each other, and for nobody's prompt to be
    tokenised. The thread starts with the first request that needs it, or with `prepare`.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, num_vocab: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._num_vocab = num_vocab
        self._maker = TokenRuleMaker(tokenizer, num_vocab=num_vocab, eos_token_ids=eos_token_ids)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rules")

    async def prepare(self) -> None:
        """Before the worker is ready: the first grammar would stop every stream for that long."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._maker.prepare)

    async def rules_of(self, params: SamplingParams) -> TokenRules | None:
        """Fresh rules; None, and at once, if there is nothing to rule.

        Raises BadRequest, which names the field at fault.
        """
        if not has_token_rules(params):
            return None
        check_sampling(params, self._num_vocab)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._maker.rules_of, params)
