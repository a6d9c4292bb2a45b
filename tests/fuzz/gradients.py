"""Whether a training step of a random model has the gradients that eager has.

The model is trained in a factor for each of its float inputs, 1 + p, of the input's
shape with 1 for dynamic dims, and in its weights; the loss is a sum over all that it
returns. So a wrong derivative of any element shows in some factor.

Half of the models get whole numbers from -2 to 2. There a derivative is often a matter
of convention: at 0, at a bound, among equal elements. Eager's f32 and f64 choose alike,
and what they agree on is the answer. For other numbers the rounding errors of a
gradient are measured as those of a result are (judge.py), by shaking the values of the
model in f64; BACKWARD allows for those of the way back, which is not shaken.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from judge import SHAKES, TINY, UNITS, MovedPositions, Shake, Verdict, widened
from random_models import Input, Model, Sizes
from torch import Tensor, nn

import pliant

BACKWARD = 64.0  # rounding errors, in units of the terms of a gradient
CLOSE = {  # of numbers that are no whole ones any more, to each other
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 0.03,
    torch.bfloat16: 0.1,
}
FEW = SHAKES // 2
# Changed in place, a tensor of floats keeps its gradient in eager, though the op has no
# derivative; ours stops it there.
NO_REFERENCE = r"logical_\w+_|bitwise_\w+_|(eq|ne|lt|le|gt|ge)_"
# Which of equal elements these take is not said, and eager's sorts are not stable.
OF_EQUALS = r"sort|topk|kthvalue|median|quantile|\bmode\b"


class Whole(Input):
    """An input whose floats are few whole numbers."""

    def make(self, sizes: Sizes, seed: int) -> Tensor:
        made = super().make(sizes, seed)
        if not made.is_floating_point():
            return made
        return made.nan_to_num(0, 0, 0).mul(1.3).round().clamp(-2, 2)


class Trained(nn.Module):
    """A model with its weights and a factor of each float input as parameters."""

    def __init__(self, model: Model, inner: nn.Module, wide: bool) -> None:
        super().__init__()
        self.inner, self.factors = inner, nn.ParameterList()
        self.which: list[int | None] = []
        for given in model.inputs:
            self.which.append(None)
            if given.dtype.is_floating_point:
                self.which[-1] = len(self.factors)
                shape = [d if isinstance(d, int) else 1 for d in given.dims]
                dtype = torch.float64 if wide else given.dtype
                self.factors.append(nn.Parameter(torch.zeros(shape, dtype=dtype)))
        for name, data in list(inner.named_buffers()):
            if data.is_floating_point():
                delattr(inner, name)
                inner.register_parameter(name, nn.Parameter(data))

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        scaled = [
            x if k is None else x * (1 + self.factors[k])
            for x, k in zip(inputs, self.which, strict=True)
        ]
        return list(self.inner(*scaled))


def loss(results: Sequence[Tensor]) -> Tensor:
    floats = [r for r in results if r.is_floating_point()]
    parts = [(r * r * 0.5).sum() + 0.3 * r.sum() for r in floats]
    return torch.stack([p.to(parts[0].dtype) for p in parts]).sum()


def of_eager(trained: Trained, args: Sequence[Tensor]) -> list[Tensor] | None:
    """The gradients of eager; None where it has none."""
    trained.zero_grad()
    try:
        loss(trained(*args)).backward()
    except Exception:
        return None
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for p in trained.parameters()
    ]


def in_double(model: Model, sizes: Sizes, shake: Shake | None) -> list[Tensor] | None:
    args = [a.double() if a.is_floating_point() else a for a in model.arguments(sizes)]
    torch.set_default_dtype(torch.float64)  # of integers that are divided
    try:
        if shake is None:
            return of_eager(Trained(model, widened(model), True), args)
        with MovedPositions(shake):
            args = [shake(a) for a in args]
            return of_eager(Trained(model, widened(model, shake), True), args)
    finally:
        torch.set_default_dtype(torch.float32)


def difference(
    model: Model, sizes: Sizes, got: Tensor, runs: list[Tensor], largest: float
) -> Tensor:
    """Where a gradient is wrong; the runs are eager's, in f64, and then shaken.

    `largest` is the largest gradient of the model. One that is 0 for any values, as
    that of a length which is divided away, is a difference of terms that no shake
    moves.
    """
    mine, its, exact, *shaken = (r.double() for r in (got, *runs))
    kinds = [v.dtype for v in model.inputs if v.dtype in UNITS] + [got.dtype]
    kind = max(kinds, key=lambda k: UNITS[k])
    if not shaken:
        near = CLOSE[kind] * (1 + exact.abs())
        agreed = its.isfinite() & exact.isfinite() & ((its - exact).abs() <= near)
        args = model.arguments(sizes)
        most = max([1.0, *(float(a.double().abs().max()) for a in args if a.numel())])
        special = its.isinf() & (its == exact) & (mine != its)
        # Eager's norms of nothing give NaN, and 0 * NaN where a result is not used.
        unused = re.search(r"fill|full|zeros|ones|empty", model.body())
        if all(a.numel() for a in args) and not unused:
            special |= its.isnan() & exact.isnan() & ~mine.isnan()
        return (agreed & ~((mine - its).abs() <= 10 * most * near)) | special
    every = torch.stack([exact, *shaken])
    finite = its.isfinite() & every.isfinite().all(0)
    terms = (every[1:] - exact).abs().clamp_min(1e-300).log().mean(0).exp() / TINY
    floor = BACKWARD * UNITS[kind] * (terms + exact.abs() + largest)
    return finite & ~((mine - exact).abs() <= 4 * (its - exact).abs() + floor)


def judge_gradients(model: Model, whole: bool) -> Verdict:
    if whole and re.search(OF_EQUALS, model.body()):
        return Verdict("fine", "eager is no reference")
    if whole:
        inputs = tuple(Whole(**vars(v)) for v in model.inputs)
        model = replace(model, inputs=inputs)
    if not any(v.dtype.is_floating_point for v in model.inputs):
        return Verdict("fine", "no floats")
    if re.search(NO_REFERENCE, model.body()) or any(x.statement for x in model.lines):
        return Verdict("fine", "eager is no reference")
    theirs = Trained(model, model.module(), False)
    example = tuple(model.arguments(model.sizes[0]))
    if of_eager(theirs, example) is None:
        return Verdict("fine", "eager has no gradient")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = pliant.compile_training(
                Trained(model, model.module(), False),
                loss,
                pliant.SGD(0.1),
                (example, ()),
                (model.dynamic(), ()),
                threads=1,
            )
        for sizes in model.sizes:
            found = judge_at(model, sizes, step, theirs, whole)
            if found.kind != "fine":
                return found
    except pliant.InternalError as error:
        return Verdict("internal", str(error))
    except pliant.PliantError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Verdict("internal", f"{type(error).__name__}: {error}")
    return Verdict("fine")


def judge_at(
    model: Model, sizes: Sizes, step: pliant.TrainingStep, theirs: Trained, whole: bool
) -> Verdict:
    args = tuple(model.arguments(sizes))
    its, exact = of_eager(theirs, args), in_double(model, sizes, None)
    if its is None or exact is None:
        return Verdict("fine")
    try:
        _, ours = step.gradients(args, ())
    except pliant.InternalError:
        raise
    except pliant.PliantError:  # these sizes are refused
        return Verdict("fine")
    runs = [its, exact]
    if not whole:
        shakes = [Shake(model.seed * SHAKES + k) for k in range(FEW)]
        runs += [r for s in shakes if (r := in_double(model, sizes, s)) is not None]
        if len(runs) == 2:
            return Verdict("fine", "no reference")
    magnitudes = [float(g.abs().nan_to_num(0, 0, 0).max()) for g in exact if g.numel()]
    largest = max(magnitudes, default=0.0)
    for k, (name, p) in enumerate(theirs.named_parameters()):
        got = ours.get(name, torch.zeros_like(p))
        off = difference(model, sizes, got, [r[k] for r in runs], largest)
        if off.any():
            mine, want = got[off][:3].tolist(), its[k][off][:3].tolist()
            return Verdict(
                "wrong", f"gradient of {name} at {sizes}: {mine}, not {want}"
            )
    return Verdict("fine")
