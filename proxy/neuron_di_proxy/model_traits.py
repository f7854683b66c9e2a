"""What the workers say of a model, as far as it decides which requests can be served."""

from collections.abc import Iterable
from dataclasses import dataclass

from neuron_di.wire import ToolFormat, WorkerRecord
from neuron_di_proxy.route import Directory, ModelNotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What is known of one model. The defaults stand for what no worker has said."""

    tool_format: ToolFormat | None = None  # how it writes tool calls when nothing forces it
    reasoning: tuple[str, str] | None = None  # the tags around its reasoning
    num_vocab: int | None = None
    context_tokens: int | None = None  # of the worker that holds the most


class TraitsBook:
    """The traits of all models of a directory, found again when its snapshot is another one."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._known: tuple[WorkerRecord, ...] = ()
        self._traits: dict[str, ModelTraits] = {}  # of models that workers have: not many

    def of(self, model: str) -> ModelTraits:
        """As `traits_of`."""
        known = self._directory.workers()
        if known is not self._known:
            self._known, self._traits = known, {}
        found = self._traits.get(model)
        if found is None:
            found = traits_of(self._directory, model)
            if known:
                self._traits[model] = found
        return found


def traits_of(directory: Directory, model: str) -> ModelTraits:
    """The traits of `model`; the defaults while no worker is known, for some may come soon.

    Raises ModelNotFound when workers are known and none has the model.
    """
    known = directory.workers()
    records = [record for record in known if record.model == model]
    if known and not records:
        raise ModelNotFound(f"the model {model!r} does not exist", param="model")
    return ModelTraits(
        tool_format=next((r.tool_format for r in records if r.tool_format is not None), None),
        reasoning=next((r.reasoning for r in records if r.reasoning is not None), None),
        num_vocab=_largest(record.num_vocab for record in records),
        context_tokens=_largest(record.context_tokens for record in records),
    )


def _largest(counts: Iterable[int]) -> int | None:
    return max(counts, default=0) or None
