"""Stages of the compiler on text, verified and interpreted: what they print.

    expect(opt(text, "canonicalize,fuse"), \"\"\"...\"\"\")

`pytest --accept` writes what is printed now into the tests; the diff is then reviewed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import dedent

from expecttest import assert_expected_inline

from pliant.commands.opt import Sample, optimised
from pliant.context import Context, Training
from pliant.ir.graph import Module
from pliant.ir.parse import parse_module
from pliant.ir.text import print_module
from pliant.machine.target import named
from pliant.options import Options
from pliant.pipeline import STAGES

SIZES = (0, 1, 3, 7, 64)  # none, one, odd, prime, more than a vector


def opt(
    text: str,
    passes: str,
    *,
    target: str = "avx2",
    off: Iterable[str] = (),
    train: tuple[str, ...] = (),
    update: tuple[str, ...] = (),
    stores: tuple[tuple[str, int], ...] = (),
    sizes: Iterable[int | Mapping[str, int]] = SIZES,
) -> str:
    """What stages make of a module, whose results are the same at all `sizes`.

    A size is that of every dim, or says each. Of a training step only the results that
    a stage keeps are compared.
    """
    by_name = {stage.name: stage for stage in STAGES}
    training = None
    if train or update:
        training = Training(train, lambda b, params, gradients: gradients, update)
    options = Options(**dict.fromkeys(off, False))
    cx = Context(options, named(target), training, stores)
    module = parse_module(dedent(text))
    names = passes.split(",")
    made = optimised(module, [by_name[name] for name in names], cx)
    for size in sizes:
        dims = size if isinstance(size, Mapping) else dict.fromkeys(_dims(module), size)
        sample = Sample(module.main, dict(dims))
        for name, after in zip(["input", *names], made, strict=True):
            sample.check(name, after)
    return print_module(made[-1])


def _dims(module: Module) -> set[str]:
    shapes = [d for v in module.main.params for d in v.shape]
    return {name for d in shapes for name in d.symbols()} | set(module.main.sizes)


def expect(printed: str, wanted: str) -> None:
    assert_expected_inline(printed, wanted, skip=1)
