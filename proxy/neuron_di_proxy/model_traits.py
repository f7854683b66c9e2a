"""What the workers say of a model, as far as it decides which requests can be served."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neuron_di.errors import CapacityError
from neuron_di.wire import ToolFormat, WorkerRecord
from neuron_di_proxy.known_models import KnownModels
from neuron_di_proxy.route import Directory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What is known of one model. The defaults stand for what no worker has said."""

    tool_format: ToolFormat | None = None  # how it writes tool calls when nothing forces it
    reasoning: tuple[str, str] | None = None  # the tags around its reasoning
    num_vocab: int | None = None
    context_tokens: int | None = None  # of the worker that holds the most
    # Of `SamplingParams`, by name: what requests take that do not say.
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)


class TraitsUnknown(CapacityError):
    """Raised where a request is read for a model of which no worker has said anything yet."""

    def __init__(self, model: str, reason: str = "no worker is known") -> None:
        super().__init__(reason)
        self.model = model


FORMER_MAX = 64
_UNKNOWN = ModelTraits()


class TraitsBook:
    """The traits of all models of a directory, found again when its snapshot is another one."""

    def __init__(self, directory: Directory, models: KnownModels | None = None) -> None:
        self._directory = directory
        self._models = models or KnownModels()
        self._known: tuple[WorkerRecord, ...] = ()
        self._traits: dict[str, ModelTraits] = {}  # of models that workers have: not many
        self._former: dict[str, ModelTraits] = {}  # of those that they had before

    def of(self, model: str) -> ModelTraits:
        """The traits of `model`. While none of its workers is known: what they were, else the
        defaults, for some may come soon.

        Raises ModelNotFound when workers are known, but none that has, or had lately, the model.
        """
        known = self._directory.workers()
        if known is not self._known:
            former = list((self._former | self._traits).items())
            self._former = dict(former[-FORMER_MAX:])
            self._known, self._traits = known, {}
        found = self._traits.get(model)
        if found is None:
            self._models.require(model, known)
            records = [record for record in known if record.model == model]
            if not records:
                return self._former.get(model, _UNKNOWN)
            found = self._traits[model] = _traits_of(records)
        return found

    def said_of(self, model: str) -> ModelTraits:
        """As `of`, but raises TraitsUnknown instead of giving the defaults.

        A request that is read by these has no reasoning and no defaults of its model's, and may be
        refused for tools that the model knows.
        """
        found = self.of(model)
        if found is _UNKNOWN:
            raise TraitsUnknown(model)
        return found


def _traits_of(records: Sequence[WorkerRecord]) -> ModelTraits:
    return ModelTraits(
        tool_format=next((r.tool_format for r in records if r.tool_format is not None), None),
        reasoning=next((r.reasoning for r in records if r.reasoning is not None), None),
        num_vocab=_largest(record.num_vocab for record in records),
        context_tokens=_largest(record.context_tokens for record in records),
        sampling_defaults=next(filter(None, (r.sampling_defaults.given() for r in records)), {}),
    )


def _largest(counts: Iterable[int]) -> int | None:
    return max(counts, default=0) or None
