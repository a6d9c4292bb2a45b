"""A training step's tensors in a torch module: where they are, and as they are now.

A step that is compiled once is called for as long as training takes, and meanwhile
tensors may be replaced, retied, moved or cast. So a step keeps places, not tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pliant.errors import StepChangedError

AGAIN = "call compile_training again"


@dataclass(frozen=True, slots=True)
class VariablePlace:
    """An entry of a module's parameters or buffers."""

    path: tuple[str, ...]  # of submodules
    table: str  # the module's dict: _parameters or _buffers
    key: str

    @property
    def name(self) -> str:
        """The name in the user's module, without the prefix of the common root."""
        return ".".join((*self.path, self.key)).removeprefix("model.")

    def tensor(self, root: Any) -> Any:
        """The tensor at this place now; None if there is none."""
        for name in self.path:
            root = root._modules.get(name)
            if root is None:
                return None
        return getattr(root, self.table).get(self.key)


def places_of(root: Any) -> dict[int, list[VariablePlace]]:
    """Where each tensor of a module is kept, by its id; tied ones have several."""
    found: dict[int, list[VariablePlace]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        parts = tuple(path.split(".")) if path else ()
        for table in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, table).items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append(
                        VariablePlace(parts, table, key)
                    )
    return found


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor of the module's that is a param of `main`: looked up at each call."""

    name: str  # of the param
    dtype: Any  # torch's
    shape: tuple[int, ...]
    places: tuple[VariablePlace, ...]

    def find(self, root: Any) -> Any:
        """The tensor as it is now, if compiled code can read and write it."""
        first, *others = self.places
        tensor = first.tensor(root)
        for place in others:
            if place.tensor(root) is not tensor:
                raise StepChangedError(
                    f"'{first.name}' and '{place.name}' were one tensor when the step "
                    f"was compiled, and are not any more: tie them again, or {AGAIN}"
                )
        if tensor is None:
            raise StepChangedError(
                f"the model has no '{first.name}' any more, with which the step was "
                f"compiled: {AGAIN}"
            )
        self.check(f"'{first.name}'", tensor)
        return tensor

    def check(self, what: str, tensor: Any) -> None:
        """Refuses what compiled code would not read and write in place."""
        if tensor.dtype is not self.dtype or tensor.shape != self.shape:
            then, now = (
                _shown(self.dtype, self.shape),
                _shown(tensor.dtype, tensor.shape),
            )
            raise StepChangedError(
                f"{what} was {then} when the step was compiled, and is {now} now: "
                f"{AGAIN}"
            )
        if not tensor.is_cpu:
            raise StepChangedError(
                f"{what} is on {tensor.device} now; the step was compiled for the cpu"
            )
        if not tensor.is_contiguous():
            raise StepChangedError(
                f"{what} is not contiguous any more, its strides are "
                f"{tensor.stride()}: a step writes it in place, in row-major order; "
                "undo that with model.to(memory_format=torch.contiguous_format)"
            )
        if tensor.data_ptr() % tensor.element_size() or tensor.is_neg():
            raise StepChangedError(
                f"{what} is not aligned, or is the lazy negative of another tensor: "
                "replace it by its .clone()"
            )


def _shown(dtype: Any, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
