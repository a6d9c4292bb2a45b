"""What a compiled model tells of itself: numbers of its runs, times, reports.

What makes reports is imported when one is asked for: `load` is to be quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pliant.errors import OptionError
from pliant.image.parts import ModelImage, PeakTerms
from pliant.model.parts import ModelPart

if TYPE_CHECKING:
    from pliant.program import Program
    from pliant.report.profile import KernelTime


class ModelReport(Protocol):
    """What is known of how a model was made."""

    @property
    def program(self) -> Program | None:
        """What the compiler made of it; None if it was loaded from a file."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """That each stage of compiling took, or loading."""

    @property
    def kernels_built(self) -> int:
        """By LLVM, for this model."""

    @property
    def kernels_cached(self) -> int:
        """Found in memory or on disk."""

    def explain(self, threads: int, dims: Mapping[str, int] | None) -> str: ...

    def peak(self) -> PeakTerms: ...


@dataclass(frozen=True, slots=True)
class Description:
    """Of one compiled program."""

    image: ModelImage
    parts: tuple[ModelPart, ...]
    threads: int
    report: ModelReport

    def stats(self, compiles: int, weight_bytes: int) -> dict[str, Any]:
        run, report = self.parts[0].runtime.stats(), self.report
        return {
            "compiles": compiles,
            "calls": run.calls,
            "failures": run.failures,
            "plans": run.plans_made,
            "plan_hits": run.plan_hits,
            "plans_cached": run.plans_cached,
            "arena_bytes": run.arena_bytes,
            "last_peak_bytes": run.last_peak_bytes,
            "last_planned_bytes": run.last_planned_bytes,
            "last_copied_bytes": run.last_copied_bytes,
            "last_arena_bytes": run.last_arena_bytes,
            "last_sizes": self._last_sizes(),
            "recomputed_calls": run.last_recomputed_steps,
            "spilled_bytes": run.last_spilled_bytes,
            "weight_bytes": weight_bytes,
            "kernels": sum(part.kernels for part in self.image.parts),
            "kernel_calls": sum(part.kernel_calls for part in self.image.parts),
            "kernels_built": report.kernels_built,
            "kernels_cached": report.kernels_cached,
            "threads": self.threads,
            "compile_seconds": sum(report.seconds.values()),
            "stage_seconds": dict(report.seconds),
        }

    def _last_sizes(self) -> dict[str, int]:
        """What the data of the last call decided; nothing if there was none."""
        part = self.parts[-1]
        if not part.found:
            return {}
        values = part.runtime.last_symbols()
        names = {size.name for size in part.found}
        pairs = zip(part.symbols, values, strict=False)
        return {name: value for name, value in pairs if name in names}

    def profile(
        self, run: Callable[[], object], dims: Callable[[], Mapping[str, int]]
    ) -> list[KernelTime]:
        """The times of the kernels of one run, whose dims are asked for after it."""
        from pliant.report.profile import kernel_times

        if self.parts[0].stamps is None:
            raise OptionError(
                "this model keeps no times: compile it with "
                "instruments=pliant.Instruments(profile=True)"
            )
        for part in self.parts:
            assert part.stamps is not None
            part.stamps.fill(0)
        run()
        env = {**dims(), "threads": self.threads}
        times: list[KernelTime] = []
        for part in self.parts:
            assert part.stamps is not None
            env |= zip(part.symbols, part.runtime.last_symbols(), strict=False)
            times += kernel_times(part.image, part.stamps.tolist(), env)
        return times

    def explain(self, dims: Mapping[str, int] | None) -> str:
        return self.report.explain(self.threads, dims)

    def peak_formula(self) -> str:
        from pliant.report.formula import peak_text

        return peak_text(self.report.peak(), self.threads)

    def peak_summary(self) -> str:
        from pliant.report.formula import peak_summary

        return peak_summary(self.report.peak(), self.threads)
