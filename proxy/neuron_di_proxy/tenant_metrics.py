"""What each tenant asked for, as metrics. Without API keys nothing is counted.

Names are the key file's: whoever may read the metrics is an operator.
"""

from collections import Counter
from collections.abc import Iterable
from typing import get_args

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from neuron_di.types import FinishReason
from neuron_di_proxy.receipts import Receipt
from neuron_di_proxy.tenant import EVERYBODY

TENANTS_MAX = 256  # since the start, those whose keys have gone included
OTHER = "other"


class TenantMetrics:
    """Counts by tenant. Those beyond TENANTS_MAX are one."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._choices: Counter[tuple[str, str]] = Counter()  # by outcome
        self._tokens: Counter[tuple[str, str]] = Counter()  # by kind
        self._limited: Counter[tuple[str, ...]] = Counter()

    def count(self, receipt: Receipt) -> None:
        """A choice ended."""
        if receipt.tenant == EVERYBODY.name:
            return
        name = self._bounded(receipt.tenant)
        self._choices[name, receipt.finish_reason] += 1
        self._tokens[name, "prompt"] += receipt.num_prompt
        self._tokens[name, "generated"] += receipt.num_generated

    def count_left(self, tenant: str, num_choices: int) -> None:
        """A client left while its choices waited for their turn."""
        if tenant != EVERYBODY.name:
            self._choices[self._bounded(tenant), "cancelled"] += num_choices

    def count_limited(self, tenant: str) -> None:
        """A request was refused because its tenant has its share already."""
        self._limited[(self._bounded(tenant),)] += 1

    def families(self) -> Iterable[Metric]:
        for name, words, labels, counts in (
            ("choices", "choices of requests", ("tenant", "outcome"), self._choices),
            ("tokens", "tokens of prompts and answers", ("tenant", "kind"), self._tokens),
            ("limited", "requests beyond the tenant's limits", ("tenant",), self._limited),
        ):
            family = CounterMetricFamily(f"neuron_di_tenant_{name}", words, labels=labels)
            for key, count in counts.items():
                family.add_metric(key, count)
            yield family

    def _bounded(self, name: str) -> str:
        if name in self._names:
            return name
        if len(self._names) >= TENANTS_MAX:
            name = OTHER
        else:
            self._names.add(name)
        # What is not there before it happens first is no increase to a monitoring system.
        self._choices.update(dict.fromkeys(((name, ended) for ended in get_args(FinishReason)), 0))
        self._limited.update({(name,): 0})
        return name
