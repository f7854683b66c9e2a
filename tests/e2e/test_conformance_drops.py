"""The differential suite where both endpoints drop the same field in silence."""

import pytest
import pytest_asyncio
from conformance_kit import LONG_PROMPT_CHARS, compare, findings
from openai_kit import Client
from tampering_relay import relay

from neuron_di.testing.conformance import Endpoint, Probe, learn

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

# Of these a rule or an endpoint's two answers tell that they were obeyed: (field, case).
TOLD = [
    ("max_tokens", "length-1"), ("max_completion_tokens", "chat-length-1"),
    ("min_tokens", "min-tokens"), ("min_tokens", "min-tokens-certain"),
    ("stop", "stop-later"), ("stop", "chat-stop"),
    ("include_stop_str_in_output", "stop-included"),
    ("stop_token_ids", "stop-token-id-certain"),
    ("temperature", "n-3-greedy"), ("seed", "seed"),
    ("top_k", "top-k-1"), ("top_p", "top-p-best"), ("min_p", "min-p-1"),
    ("logit_bias", "logit-bias"), ("allowed_token_ids", "allowed-token-ids"),
    ("n", "n-3"), ("truncate_prompt_tokens", "truncate-prompt"),
    ("logprobs", "logprobs-1"), ("logprobs", "chat-logprobs"),
    ("top_logprobs", "chat-top-logprobs"), ("return_token_ids", "return-token-ids"),
    ("echo", "echo"), ("stream_options", "length-64"),
    ("response_format", "format-json-schema"), ("structured_outputs", "structured-choice"),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def probe(tiny_tales_1p1d: Client) -> Probe:
    endpoint = Endpoint("A", tiny_tales_1p1d.url, tiny_tales_1p1d.session)
    return await learn(endpoint, long_prompt_chars=LONG_PROMPT_CHARS)


@pytest.mark.parametrize(("field", "case"), TOLD)
async def test_what_both_endpoints_drop_in_silence_is_found(
    tiny_tales_1p1d: Client, probe: Probe, field: str, case: str
) -> None:
    async with relay(tiny_tales_1p1d.url, tiny_tales_1p1d.session, drops=field) as url:
        results = await compare((url, url), tiny_tales_1p1d, probe, [case])
    assert findings(results)
    assert results[0].outcome in ("broken", "differs")
