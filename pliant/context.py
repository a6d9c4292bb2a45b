"""What every pass is given: options, the target, and the training step, if any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pliant.ir.build import Builder, facts_of
from pliant.ir.graph import Graph, Names, Value
from pliant.ir.packed import PackedConstants
from pliant.machine.target import Target
from pliant.options import Options
from pliant.sym import Facts

# (builder, params by name, gradients) -> results after the loss
Extend = Callable[[Builder, dict[str, Value], Sequence[Value]], Sequence[Value]]


@dataclass(frozen=True, slots=True)
class Training:
    """The parameters of `main` to differentiate by, and what becomes of gradients.

    `updates` names, for each result behind the loss, the parameter whose new value it
    is; without any, the results are the caller's. `main` itself gives the first
    `changed` of them. `key` says in words what `extend` does, to be found in the cache
    (program_cache.py); without one, the step is not kept.
    """

    wrt: tuple[str, ...]
    extend: Extend
    updates: tuple[str, ...] = ()
    changed: int = 0
    key: str | None = None

    def trained(self, graph: Graph) -> list[Value]:
        """The parameters to differentiate by, as values of a graph."""
        names = set(self.wrt)
        return [v for v in graph.params if v.name in names]


@dataclass(frozen=True, slots=True)
class Context:
    options: Options
    target: Target
    training: Training | None = None  # None: the module is only run
    # Inference: params, and the numbers of the results that are their new values.
    stores: tuple[tuple[str, int], ...] = ()
    # Kernels by the form of their fusion (lower/alike.py).
    kernels: dict[object, object] = field(
        default_factory=dict, repr=False, compare=False
    )
    kernel_names: Names = field(default_factory=Names, repr=False, compare=False)
    # Weights in the layout of a kernel, which regions and versions share.
    packed: PackedConstants = field(
        default_factory=PackedConstants, repr=False, compare=False
    )
    # A part of a model: its results are read by the other parts.
    is_part: bool = False
    # Sizes that data decide are left to `split`, but for those that regions find.
    splits: bool = False
    held: dict[Facts, None] = field(default_factory=dict, repr=False, compare=False)

    def facts(self, graph: Graph) -> Facts:
        """What the graph's constraints state of its symbols.

        It is held as long as the context is: the next pass gets the same object, and
        with it what this one has worked out.
        """
        facts = facts_of(graph)
        self.held[facts] = None
        return facts
