"""Products of int8 against torch._int_mm and our own f32: `python -m bench.int8`.

    constant    B known when compiling
    dynamic     both operands known at the call
    turned      the same, B stored as (N, K)

Results are checked; each row is one interleaved run, the median of each. Numbers are
billions of operations a second, two to a multiply-add. Writes bench/results/int8.json
and int8.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch

import pliant
from bench.script import add_timing_arguments, save, show, tell
from pliant.compare.tables import Report
from pliant.compare.timing import medians
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module
from pliant.ir.types import DType, tensor
from pliant.sym import sym

M, N, K = sym("m"), sym("n"), sym("k")
SHAPES = (
    (1, 4096, 1024),
    (16, 4096, 1024),
    (33, 3072, 768),
    (128, 768, 768),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
)
Call = Callable[[], torch.Tensor]
Sizes = tuple[int, int, int]


def compiled(
    dtype: DType, threads: int, right: torch.Tensor | None = None, turned: bool = False
) -> pliant.CompiledModel:
    b = Builder()
    x = b.param("x", tensor(dtype, M, K if right is None else right.shape[0]))
    if right is not None:
        y = b.constant(Constant("right", tensor(dtype, *right.shape), right.numpy()))
    elif turned:
        y = b.transpose(b.param("y", tensor(dtype, N, K)), (1, 0))
    else:
        y = b.param("y", tensor(dtype, K, N))
    main = b.finish("main", [b.emit("matmul", x, y)])
    module = Module({"main": main}, constants=dict(b.constants))
    return pliant.compile(module, threads=threads)


class Int8Bench:
    def __init__(self, threads: int, rounds: int) -> None:
        self.threads, self.rounds = threads, rounds
        self.dynamic = compiled(DType.I8, threads)
        self.turned = compiled(DType.I8, threads, turned=True)
        self.floats = compiled(DType.F32, threads)

    def measure(self, sizes: Sizes) -> dict[str, float]:
        """Billions of operations per second."""
        m, n, k = sizes
        x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
        y = torch.randint(-128, 128, (k, n), dtype=torch.int8)
        y_turned = y.t().contiguous()
        constant = compiled(DType.I8, self.threads, y)
        products: dict[str, Call] = {
            "constant": partial(constant, x),
            "dynamic": partial(self.dynamic, x, y),
            "turned": partial(self.turned, x, y_turned),
            "torch._int_mm": partial(torch._int_mm, x, y),
            "torch turned": partial(torch._int_mm, x, y_turned.t()),
        }
        want = torch._int_mm(x, y)
        for name, call in products.items():
            if not torch.equal(call(), want):
                raise SystemExit(f"wrong result: {name} {sizes}")
        floats = compiled(DType.F32, self.threads, y.float())
        products["f32 constant"] = partial(floats, x.float())
        products["f32 dynamic"] = partial(self.floats, x.float(), y.float())
        seconds = medians(products, self.rounds)
        return {name: 2e-9 * m * n * k / t for name, t in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.int8", description=__doc__)
    add_timing_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tell(1, f"{len(SHAPES)} sizes")
    bench = Int8Bench(arguments.threads, arguments.rounds)
    rows = {sizes: bench.measure(sizes) for sizes in SHAPES}
    columns = tuple(next(iter(rows.values())))
    texts = tuple(
        ("x".join(map(str, sizes)), *(f"{row[name]:.0f}" for name in columns))
        for sizes, row in rows.items()
    )
    title = (
        f"int8 products, billions of operations a second, {arguments.threads} thread"
    )
    table = Report(title, ("M x N x K", *columns), texts)
    show([table])
    kept = [{"sizes": sizes, "rates": row} for sizes, row in rows.items()]
    content = {"threads": arguments.threads, "rows": kept}
    save("int8", content, [table], arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
