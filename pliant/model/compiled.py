"""A compiled model, as its user sees it.

Its jobs are done elsewhere: calls are run in running.py, memory is planned in
planning.py, errors of refused calls are in refusals.py, and what the model tells of
itself is in describing.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pliant.errors import PliantError
from pliant.frontend.signature import LengthSlot, Signature, Slot
from pliant.image.parts import LoadedCode, ModelImage
from pliant.model.arguments import parse_bytes
from pliant.model.arrays import Weights
from pliant.model.buffers import Buffers
from pliant.model.describing import Description, ModelReport
from pliant.model.parts import WeightBlocks, make_parts
from pliant.model.planning import MemoryPlan, Planner, limit_of
from pliant.model.refusals import Refusals
from pliant.model.running import Runner
from pliant.runtime.caller import Caller

if TYPE_CHECKING:
    from pliant.program import Program
    from pliant.report.page import ReportContent
    from pliant.report.profile import KernelTime
    from pliant.report.timeline import Timeline


RUNS = 5  # of which a report shows the fastest


class CompiledModel(Caller):
    """Native code for every shape. Safe to call from several threads.

    Called, it runs the model: torch in gives torch out, NumPy in gives NumPy out.
    """

    def __init__(
        self,
        image: ModelImage,
        code: LoadedCode,
        signature: Signature,
        weights: Weights,
        threads: int,
        memory_limit: int | None,
        report: ModelReport,
        buffers: Buffers | None = None,
    ) -> None:
        """Calls change the `buffers`."""
        self._buffers = buffers
        self._code = code
        self._signature = signature
        self._weights = weights
        blocks = WeightBlocks.of(image)
        parts = make_parts(image, code, threads, memory_limit, blocks, weights.arrays)
        self._runtime = parts[0].runtime
        weights.serve(self._runtime, blocks.all)
        self._limit = memory_limit
        refusals = self._refusals = Refusals(parts, signature, threads)
        self._planner = Planner(signature, threads, refusals)
        direct = signature.is_direct
        self._runner = Runner(signature, self._runtime, refusals, buffers, direct)
        self._description = Description(image, parts, threads, report)
        if direct:
            self._delegate(self._runtime, signature.rebuild_direct())

    @property
    def program(self) -> Program:
        """What the compiler made of it, for tools and tests to look at."""
        program = self._description.report.program
        if program is None:
            raise PliantError("a model that was loaded from a file has no program")
        return program

    # ---- running; C code calls these

    def _call_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._runner.call(self, args, kwargs)

    def _call_failed(
        self, args: tuple[Any, ...], status: int, detail: tuple[int, ...]
    ) -> Any:
        return self._runner.failed(args, status, detail)

    # ---- weights

    def refresh(self) -> None:
        """Takes the module's weights as they are now.

        A call does so by itself when torch has counted a change of them. This is for
        changes that torch does not count: through `.data`, NumPy or the storage.
        """
        held = self._buffers is not None and self._buffers.is_following
        if not self._weights.is_following and not held:
            raise PliantError(
                "this model follows no module: it was compiled from none, the module "
                "is gone, or freeze() was called"
            )
        self._weights.refresh(always=True)

    def freeze(self) -> None:
        """Keeps the weights as they are now, and stops following the module."""
        self._weights.refresh()
        self._weights.stop()
        if self._buffers is not None:
            with self._buffers.lock:
                self._buffers.freeze()

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._weights.arrays)

    # ---- time

    def profile(self, /, *args: Any, **kwargs: Any) -> list[KernelTime]:
        """Runs once and returns the time of each kernel call, in order.

        For a model compiled with `Instruments(profile=True)`. Calls from other threads
        meanwhile write their times to the same place.
        """
        return self._description.profile(
            lambda: self(*args, **kwargs),
            lambda: self._refusals.symbols_of(self._signature.flatten(args, kwargs)),
        )

    # ---- reports

    def report(
        self,
        path: str | os.PathLike[str],
        /,
        *inputs: Any,
        memory_limit: int | str | None = None,
        **dims: int,
    ) -> None:
        """Writes one HTML file: memory over time, peaks, kernels, guards, stages.

        It needs no network. Sizes are those of the inputs, or dims by name. Times of
        kernels are in it if there are inputs and the model was compiled with
        `Instruments(profile=True)`, the module after each stage if with
        `Instruments(keep_ir=True)`.
        """
        from pliant.report.page import page

        Path(path).write_text(page(self.report_data(inputs, memory_limit, dims)))

    def report_data(
        self,
        inputs: tuple[Any, ...],
        memory_limit: int | str | None,
        dims: Mapping[str, int],
        name: str = "pliant report",
    ) -> ReportContent:
        """What `report` writes, as values."""
        from pliant.model.reporting import report_of

        parts = self._planner.parts
        sizes = self.memory_plan(*inputs, **dims).dims if inputs else dims
        self._planner.named("report", sizes)
        timed = bool(inputs) and parts[0].stamps is not None
        runs = [self.profile(*inputs) for _ in range(RUNS if timed else 0)]
        times = min(runs, key=lambda run: sum(k.seconds for k in run), default=None)
        limit = limit_of(memory_limit, self._limit).bytes
        return report_of(self, parts, name, dict(sizes), limit, times)

    def trace(self, /, *inputs: Any, path: str | os.PathLike[str]) -> None:
        """Runs once and writes a trace for Perfetto or chrome://tracing.

        It has the kernels with their lines, and the bytes that the call holds. For a
        model compiled with `Instruments(profile=True)`.
        """
        from pliant.report.trace import trace_events

        times = self.profile(*inputs)
        sizes = {**self.memory_plan(*inputs).dims, **self.stats()["last_sizes"]}
        memory = self.memory_timeline(**sizes)
        threads = self.stats()["threads"]
        Path(path).write_text(json.dumps(trace_events(times, memory, sizes, threads)))

    def _repr_html_(self) -> str:
        from pliant.model.reporting import card_of
        from pliant.report.card import card

        return card(card_of(self))

    @property
    def stage_texts(self) -> tuple[tuple[str, str], ...]:
        """The module after each stage, where `Instruments.keep_ir` asked for it."""
        program = self._description.report.program
        return () if program is None else program.texts

    # ---- memory

    def memory_plan(
        self, /, *inputs: Any, memory_limit: int | str | None = None, **dims: Any
    ) -> MemoryPlan:
        """The peak of a call, from inputs or from dims.

        Of inputs only shapes and strides are read. Sizes that the data decide may be
        given by name too; without them, it is a bound that holds for all
        (`is_bound`). The limit is the model's and the process's (`set_memory_budget`),
        unless one is given.
        """
        limit = limit_of(memory_limit, self._limit)
        return self._planner.plan(inputs, dims, limit, self.weight_bytes)

    def memory_timeline(
        self, *, memory_limit: int | str | None = None, **dims: Any
    ) -> Timeline:
        """The memory that a call at these dims would hold at every step."""
        limit = limit_of(memory_limit, self._limit)
        return self._planner.timeline(dims, limit)

    @property
    def peak_formula(self) -> str:
        """The peak with every knob off, as a function of the dims."""
        return self._description.peak_formula()

    @property
    def peak_summary(self) -> str:
        """Its largest terms in words: "about 9.2 KB per batch*seq, 0.3 MB fixed"."""
        return self._description.peak_summary()

    @property
    def memory_limit(self) -> int | None:
        """Cap on all that one call allocates, in bytes; may change between calls."""
        return self._limit

    @memory_limit.setter
    def memory_limit(self, limit: int | str | None) -> None:
        self._set_limit(parse_bytes(limit))

    def _set_limit(self, limit: int | None) -> None:
        self._limit = limit
        self._runtime.set_limit(limit)

    def trim(self) -> None:
        """Returns the arena to the system."""
        self._runtime.trim()

    # ---- in a file

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        variants: Sequence[CompiledModel] = (),
    ) -> str:
        """Writes code, weights and plan to one file, which `pliant.load` reads.

        `variants` are the same model compiled for other targets: loading takes the best
        one that runs on the machine. Returns the digest of the content. ArtifactError
        if the model cannot be saved.
        """
        from pliant.model.saving import save_model

        return save_model((self, *variants), path)

    def programs(self) -> tuple[CompiledModel, ...]:
        """The model itself; of one whose code branches on sizes, one for each path."""
        return (self,)

    # ---- what it is

    @property
    def dims(self) -> tuple[str, ...]:
        """The free symbols, in order of first appearance.

        Those that the data decide are behind those that the inputs decide.
        """
        return self._refusals.all_dims

    @property
    def arguments(self) -> tuple[Slot, ...]:
        """What a call takes, flat: name, element type and dims of each."""
        own = len(self._signature.arguments) - len(self._signature.held)
        arguments = self._signature.arguments[:own]
        return tuple(a for a in arguments if not isinstance(a, LengthSlot))

    @property
    def compile_count(self) -> int:
        """How many times code was generated: once."""
        return 1

    def stats(self) -> dict[str, Any]:
        return self._description.stats(self.compile_count, self.weight_bytes)

    def explain(self, /, **dims: int) -> str:
        """Symbols, constraints with their origin, kernels, guards, order, memory.

        With dims, also how each matrix product is cut at those sizes.
        """
        known = self._planner.named("explain", dims) if dims else None
        return self._description.explain(known)
