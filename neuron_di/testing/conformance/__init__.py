"""Two OpenAI endpoints, compared field by field: ours with ours, anyone's with anyone's.

    case              one request, and what is to hold of its answers
    *_cases           the declared list
    random_cases      requests that no list has
    exchange          a client that shows a stream's bytes as they came
    joined            a stream's events, and the answer they add up to
    *_rules           what must hold of each response by itself
    compare           two documents, field by field
    run, report       all cases, and what they found; `neuron-di conformance` is in `command`

Next: neuron_di/testing/conformance/case.py, neuron_di/testing/conformance/run.py
"""

from neuron_di.testing.conformance.case import Case, MustRefuse, Probe, chat, completion
from neuron_di.testing.conformance.command import CASES, choose
from neuron_di.testing.conformance.compare import Comparison, Rules
from neuron_di.testing.conformance.exchange import Endpoint, Heard
from neuron_di.testing.conformance.finding import Difference, Fault
from neuron_di.testing.conformance.random_cases import random_cases
from neuron_di.testing.conformance.run import Result, learn, run_case, run_cases

__all__ = [
    "CASES",
    "Case",
    "Comparison",
    "Difference",
    "Endpoint",
    "Fault",
    "Heard",
    "MustRefuse",
    "Probe",
    "Result",
    "Rules",
    "chat",
    "choose",
    "completion",
    "learn",
    "random_cases",
    "run_case",
    "run_cases",
]
