"""Whether a compiled random model gives what eager gives, at all its sizes."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from catalogue import SMOOTH
from random_models import Model, Sizes
from torch import Tensor, nn

import pliant

# Of the largest value in a result, that any order of summation may be off by.
FLOORS = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.float16: 6e-3,
    torch.bfloat16: 4e-2,
}
UNITS = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
BAD = ("wrong", "internal", "unlike", "crash", "hang")


@dataclass(frozen=True)
class Verdict:
    """fine, refused (with a typed error that says why), more (an answer where eager
    raises, as for a reshape of nothing to -1), or one of BAD: wrong, internal, unlike
    (its own example is refused), crash, hang."""

    kind: str
    text: str = ""

    @property
    def bad(self) -> bool:
        return self.kind in BAD


# Ops that round: the shaken reference is off by a rounding error before and after.
SMOOTH_OVERLOADS = {entry.overload for entry in SMOOTH}


class Shake:
    """Floats, each off by one rounding error to a random side."""

    def __init__(self, unit: float, seed: int) -> None:
        self.unit = unit
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        sides = torch.randint(0, 2, x.shape, generator=self.generator)
        return x * (1 + self.unit * (2 * sides - 1))


def widened(model: Model, shake: Shake | None = None) -> nn.Module:
    """The model with every float an f64, shaken where it rounds."""
    lines = []
    for line in model.lines:
        code = re.sub(
            r"torch\.(float16|bfloat16|float32)\b", "torch.float64", line.code
        )
        if shake and line.overload in SMOOTH_OVERLOADS and not line.statement:
            code = "shake(" + re.sub(r"\b[xv]\d+\b", _shaken, code) + ")"
        lines.append(replace(line, code=code))
    return replace(model, lines=tuple(lines)).module(shake=shake).double()


def _shaken(name: re.Match[str]) -> str:
    return f"shake({name[0]})"


def coarsest(model: Model, module: nn.Module, results: list[Tensor]) -> torch.dtype:
    """The float with the fewest bits anywhere in the model."""
    kinds = [v.dtype for v in model.inputs] + [b.dtype for b in module.buffers()]
    kinds += [r.dtype for r in results]
    names = re.findall(r"torch\.(float16|bfloat16|float32|float64)", model.body())
    kinds += [getattr(torch, name) for name in names]
    kinds = [k for k in kinds if k in FLOORS] or [torch.float32]
    return max(kinds, key=lambda k: FLOORS[k])


def answer(module: nn.Module, args: list[Tensor]) -> list[Tensor] | Exception:
    """What a module gives, then what its arguments have become."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [*module(*args), *args]
    except pliant.PliantError:
        raise
    except Exception as error:
        return error


def difference(
    got: Tensor, eager: Tensor, exact: Tensor | None, shaken: Tensor | None, kind: Any
) -> str | None:
    """None, or what is wrong: at most twice eager's error, and a few times what a
    rounding error at every step changes, plus a little."""
    if got.shape != eager.shape or got.dtype != eager.dtype:
        return f"{got.dtype}{list(got.shape)}, not {eager.dtype}{list(eager.shape)}"
    if not eager.numel():
        return None
    if not eager.is_floating_point():
        off = got != eager
        return f"{int(off.sum())} of {off.numel()} differ" if off.any() else None
    if exact is None or exact.shape != eager.shape:
        exact = eager
    exact = exact.double()
    shaken = exact if shaken is None or shaken.shape != exact.shape else shaken.double()
    half = kind in (torch.float16, torch.bfloat16)
    mine, its = got.double(), eager.double()
    fine = its.isfinite() & exact.isfinite() & shaken.isfinite()
    lost = fine & ~mine.isfinite()
    if lost.any():
        return f"{mine[lost][0]} where eager has {its[lost][0]}"
    if not half:
        same = its.isnan() & exact.isnan() & shaken.isnan()
        if not mine[same].isnan().all():
            return f"{mine[same & ~mine.isnan()][0]} where eager has NaN"
        both = its.isinf() & (its == exact) & (its == shaken)
        if not torch.equal(mine[both], its[both]):
            return f"{mine[both & (mine != its)][0]} where eager is infinite"
    if not fine.any():
        return None
    mine, its, exact, shaken = mine[fine], its[fine], exact[fine], shaken[fine]
    error, allowed = (mine - exact).abs(), (its - exact).abs().max()
    scale = max(1.0, exact.abs().max().item())
    moved = (shaken - exact).abs().max()
    bound = 2 * allowed.item() + 4 * moved.item() + FLOORS[kind] * scale
    if (error <= bound).all():
        return None
    at = error.argmax()
    return (
        f"{mine[at]:.9g}, eager {its[at]:.9g}, f64 {exact[at]:.9g}; error "
        f"{error[at]:.3g}, eager's at most {allowed:.3g}, allowed {bound:.3g}"
    )


def references(model: Model, sizes: Sizes, kind: Any) -> list[Any]:
    """Results in f64, and again with a rounding error at every step; None: none."""
    out: list[Any] = []
    for shake in (None, Shake(UNITS[kind], model.seed)):
        args = [
            a.double() if a.is_floating_point() else a for a in model.arguments(sizes)
        ]
        found = answer(widened(model, shake), args)
        out.append(None if isinstance(found, Exception) else found)
    return out


def judge(model: Model, options: Any = None, threads: int = 1) -> Verdict:
    module = model.module()
    eager = [answer(module, model.arguments(sizes)) for sizes in model.sizes]
    if isinstance(eager[0], Exception):
        return Verdict("fine", "eager has no answer")
    kind = coarsest(model, module, eager[0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = pliant.compile(
                module,
                tuple(model.arguments(model.sizes[0])),
                model.dynamic(),
                options=options,
                threads=threads,
            )
    except pliant.InternalError as error:
        return Verdict("internal", str(error))
    except pliant.PliantError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Verdict("internal", f"compile: {type(error).__name__}: {error}")
    refused = more = ""
    for sizes, want in zip(model.sizes, eager, strict=True):
        args = model.arguments(sizes)
        try:
            got = answer(ours, args)  # type: ignore[arg-type]
        except pliant.InternalError as error:
            return Verdict("internal", f"at {sizes}: {error}")
        except pliant.PliantError as error:
            if not isinstance(want, Exception):
                refused = f"{type(error).__name__} at {sizes}: {error}"
                if sizes == model.sizes[0]:
                    return Verdict("unlike", "its own example: " + refused)
            continue
        if isinstance(got, Exception):
            return Verdict("internal", f"at {sizes}: {type(got).__name__}: {got}")
        if isinstance(want, Exception):
            more = f"at {sizes}: an answer, eager raises {type(want).__name__}: {want}"
            continue
        exact, shaken = references(model, sizes, kind)
        names = [*model.outputs, *(v.name for v in model.inputs)]
        for k, name in enumerate(names):
            off = difference(
                got[k], want[k], exact and exact[k], shaken and shaken[k], kind
            )
            if off:
                return Verdict("wrong", f"{name} at {sizes}: {off}")
    if refused:
        return Verdict("refused", refused)
    return Verdict("more", more) if more else Verdict("fine")
