"""What a recipe is: it builds model, data set and collate function, and knows how parameters are grouped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from loongforge.recipes.settings import updated

Sample = Mapping[str, object]
ModelBatch = dict[str, object]
Collate = Callable[[Sequence[Sample]], ModelBatch]
O = TypeVar("O")  # noqa: E741


class SampleSource(Protocol):
    """A map-style data set."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Sample:
        """Return one sample."""
        ...


@runtime_checkable
class Recipe(Protocol, Generic[O]):
    """Builder of everything a run trains on.

    ``options`` turns plain values into the recipe's typed options; the three builders take those. The model
    follows the protocol ``model(batch) -> {"loss", "loss_sum", "loss_count"}`` with optional ``draw`` and
    ``loss_count``.
    """

    @property
    def name(self) -> str:
        """Name under which the recipe is known."""
        ...

    @property
    def training(self) -> Mapping[str, object]:
        """Suggested settings of the run, by their names in the run's configuration."""
        ...

    @property
    def default_options(self) -> O:
        """Options as the recipe defines them."""
        ...

    def options(self, overrides: Mapping[str, object] | None = None) -> O:
        """Return the default options with ``overrides``; ConfigError names an unknown or wrong one."""
        ...

    def build_model(self, options: O, seed: int, *, device: str = "cpu") -> nn.Module:
        """Build the model; weights depend on ``seed`` alone, the global generators stay untouched."""
        ...

    def build_dataset(self, root: str, options: O, *, episodes: Sequence[int] | None = None) -> SampleSource:
        """Open the data set under ``root``, restricted to ``episodes`` where given."""
        ...

    def build_collate(self, dataset: SampleSource, model: nn.Module, options: O) -> Collate:
        """Return the function from samples to a model batch on the host."""
        ...

    def param_groups(
        self, model: nn.Module, weight_decay: float, *, learning_rate: float | None = None
    ) -> list[dict[str, object]]:
        """Return optimizer groups of the trainable parameters, with and without weight decay.

        ``learning_rate`` is the highest of the run; None means the recipe's own.
        """
        ...


class FileRecipe(Generic[O]):
    """What all families share: a name, options that files and flags change, suggested settings of the run.

    Args:
        name: Name under which the recipe is known.
        default_options: A frozen dataclass.
        description: One line for lists of recipes.
        training: Suggested settings of the run, by their names in the run's configuration.
    """

    def __init__(
        self,
        name: str,
        default_options: O,
        *,
        description: str = "",
        training: Mapping[str, object] | None = None,
    ) -> None:
        self.name = name
        self.default_options = default_options
        self.description = description
        self.training = dict(training or {})

    def options(self, overrides: Mapping[str, object] | None = None) -> O:
        """Return the default options with ``overrides`` (nested tables or dotted names)."""
        return updated(self.default_options, overrides or {})


def decay_groups(
    named: Iterable[tuple[str, Tensor]], weight_decay: float, decays: Callable[[str], bool]
) -> list[dict[str, object]]:
    """Split trainable parameters into a decayed and an undecayed group, each with its names.

    Empty groups are left out. The order inside a group is that of ``named``.
    """
    groups: list[dict[str, object]] = []
    pairs = [(name, p) for name, p in named if p.requires_grad]
    for decay in (True, False):
        chosen = [(name, p) for name, p in pairs if decays(name) == decay]
        if chosen:
            groups.append(
                {
                    "params": [p for _, p in chosen],
                    "names": [name for name, _ in chosen],
                    "weight_decay": weight_decay if decay else 0.0,
                }
            )
    return groups
