"""What a compiled model tells of itself: numbers of its runs, times, reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pliant.errors import OptionError
from pliant.model.parts import ModelPart
from pliant.passes.fuse import kernel_count
from pliant.program import Program
from pliant.report.explain import explain, formula
from pliant.report.profile import KernelTime, kernel_times


@dataclass(frozen=True, slots=True)
class Description:
    """Of one compiled program."""

    program: Program
    parts: tuple[ModelPart, ...]
    threads: int
    seconds: Mapping[str, float]  # that each stage of compiling took

    def stats(self, compiles: int, weight_bytes: int) -> dict[str, Any]:
        run, parts = self.parts[0].runtime.stats(), list(self.program.parts())
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
            "kernels": sum(len(p.lowered.loops) for p in parts),
            "kernel_calls": sum(kernel_count(p.fused.main) for p in parts),
            "kernels_built": sum(p.code.kernels_built for p in parts),
            "kernels_cached": sum(p.code.kernels_cached for p in parts),
            "threads": self.threads,
            "compile_seconds": sum(self.seconds.values()),
            "stage_seconds": dict(self.seconds),
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
            times += kernel_times(part.program, part.stamps.tolist(), env)
        return times

    def explain(self, dims: Mapping[str, int] | None) -> str:
        return explain(self.program, self.threads, dims)

    def peak_formula(self) -> str:
        return formula(self.program, self.threads)
