"""A model whose code branches on sizes: one program for each path.

    return x * 3 if x.shape[0] == 1 else x * 2

The first program is tried first. Sizes that its guards refuse go to the others, whose
guards exclude one another, so at most one accepts them. A memory plan is that of the
program which accepts the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pliant.errors import ShapeError
from pliant.frontend.signature import SizeSlot
from pliant.model.compiled import CompiledModel
from pliant.model.planning import MemoryPlan
from pliant.runtime.description import Status

if TYPE_CHECKING:
    from pliant.report.profile import KernelTime
    from pliant.report.timeline import Timeline

T = TypeVar("T")


class BranchingModel(CompiledModel):
    """See the file's head. `others` are set once, before the first call."""

    others: tuple[CompiledModel, ...] = ()
    # Which of the others answered last, and how many calls the first had served then.
    _last: tuple[CompiledModel, int] | None = None

    def _first(self, main: Callable[[], T], other: Callable[[CompiledModel], T]) -> T:
        """The result of the program that accepts these sizes."""
        try:
            return main()
        except ShapeError as refused:
            for model in self.others:
                try:
                    return other(model)
                except ShapeError:
                    continue
            raise refused

    def check_example(self, sizes: Sequence[Sequence[int]]) -> None:
        """Raises ShapeError if no program accepts these sizes of the inputs."""
        flat = [n for shape in sizes for n in shape]
        self._first(
            lambda: self._refusals.bound(flat), lambda m: m._refusals.bound(flat)
        )

    # ---- running

    def _call_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = super()._call_other
        return self._first(
            lambda: call(args, kwargs), lambda m: self._ran(m, m(*args, **kwargs))
        )

    def _call_failed(
        self, args: tuple[Any, ...], status: int, detail: tuple[int, ...]
    ) -> Any:
        if Status(status) is Status.GUARD:  # a message is made only if all refuse
            for model in self.others:
                try:
                    return self._ran(model, model(*args))
                except ShapeError:
                    continue
        call = super()._call_failed
        return self._first(
            lambda: call(args, status, detail), lambda m: self._ran(m, m(*args))
        )

    def _ran(self, model: CompiledModel, result: Any) -> Any:
        self._last = model, self._runtime.stats().calls
        return result

    def profile(self, /, *args: Any, **kwargs: Any) -> list[KernelTime]:
        profile = super().profile
        return self._first(
            lambda: profile(*args, **kwargs), lambda m: m.profile(*args, **kwargs)
        )

    # ---- memory

    def memory_plan(
        self, /, *inputs: Any, memory_limit: int | str | None = None, **dims: Any
    ) -> MemoryPlan:
        plan = super().memory_plan
        return self._first(
            lambda: plan(*inputs, memory_limit=memory_limit, **dims),
            lambda m: m.memory_plan(
                *inputs, memory_limit=memory_limit, **self._as_of(m, dims)
            ),
        )

    def memory_timeline(
        self, *, memory_limit: int | str | None = None, **dims: Any
    ) -> Timeline:
        timeline = super().memory_timeline
        return self._first(
            lambda: timeline(memory_limit=memory_limit, **dims),
            lambda m: m.memory_timeline(
                memory_limit=memory_limit, **self._as_of(m, dims)
            ),
        )

    def _as_of(self, model: CompiledModel, dims: dict[str, Any]) -> dict[str, Any]:
        """Dims by the names of another program, which may have fixed some."""
        if not all(name in dims for name in self._refusals.dims):
            return dims
        sizes: list[int] = []
        for slot in self._signature.slots:
            if isinstance(slot, SizeSlot):
                sizes.append(dims[slot.symbol])
            else:
                sizes += [dim.evaluate(dims) for dim in slot.type.shape]
        return {**dims, **model._refusals.bound(sizes)}

    def _set_limit(self, limit: int | None) -> None:
        super()._set_limit(limit)
        for model in self.others:
            model._set_limit(limit)

    def trim(self) -> None:
        super().trim()
        for model in self.others:
            model.trim()

    # ---- weights

    def refresh(self) -> None:
        super().refresh()
        for model in self.others:
            model.refresh()

    def freeze(self) -> None:
        super().freeze()
        for model in self.others:
            model.freeze()

    def programs(self) -> tuple[CompiledModel, ...]:
        return (self, *self.others)

    # ---- what it is

    @property
    def weight_bytes(self) -> int:
        """The sum over all programs: each holds its own weights."""
        return super().weight_bytes + sum(m.weight_bytes for m in self.others)

    def explain(self, /, **dims: int) -> str:
        explain = super().explain
        if dims:
            return self._first(
                lambda: explain(**dims), lambda m: m.explain(**self._as_of(m, dims))
            )
        texts = [explain(), *(model.explain() for model in self.others)]
        return "\n\n".join(
            f"program {k + 1} of {len(texts)}\n{text}" for k, text in enumerate(texts)
        )

    def stats(self) -> dict[str, Any]:
        """Calls, memory and kernels of all programs together; the last call's own."""
        total = super().stats()
        model, calls = self._last or (self, -1)
        if model is not self and calls == total["calls"]:  # none of ours since then
            last = model.stats()
            total |= {k: v for k, v in last.items() if k.startswith(_OF_LAST)}
        for model in self.others:
            for name, value in model.stats().items():
                if name in _SUMS:
                    total[name] += value
        return {**total, "programs": 1 + len(self.others)}


_OF_LAST = ("last_", "recomputed_", "spilled_")
_SUMS: Sequence[str] = (
    *("calls", "plans", "plan_hits", "plans_cached", "arena_bytes"),
    *("kernels", "kernel_calls", "kernels_built", "kernels_cached"),
)
