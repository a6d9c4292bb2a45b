"""Products that share their left operand become one.

    %q = matmul(%x, %wq)                     %p = matmul(%x, concat(%wq, %wk))
    %a = add(%q, broadcast(%bq))      ->     %s = add(%p, broadcast(concat(%bq, -0.0)))
    %k = matmul(%x, %wk)                     %a, %k = slice(%s), slice(%s)

The weights and the rows that follow them (bias, scale) are constants, so `fold` joins
them. The slices are strided views, which attention, products and elementwise kernels
read in place. Queries, keys and values of attention are the typical case.

When it pays: several products of the same (M, K) rows cost a kernel call each, with its
own choice of tiles and its own split among threads, and each reads those rows. Merging
saves one call and one read of the rows for every product but the first. That is little
(2% of a small encoder on 7 tokens, nothing measurable where weights or arithmetic
dominate), so it must not cost anything:

- Epilogues, which a kernel computes while the tile is in cache. A gate followed by its
  sigmoid, an `up` multiplied by the activated gate or a product with a residual stay
  alone. Separate kernels for gate and up of N columns write N, read N and write N.
  Merged, they write and read 2N and write N, also with two kernels. That is 2N columns
  more against K saved: as fast within 2% for 1 to 1024 rows, but with a peak 1.4 times
  as high. The pass asks `fuse` what it does with each product alone.
- Views. A reader that takes its operand through strides must be able to take the slice;
  a slice starts and ends at a cache line; results of the graph are not slices.
- Memory. Parts of one buffer die together. A product joins a set only if the peak is
  proved to grow by at most 1% (`lifetimes`). Where queries and keys are rotated before
  attention, the values, which attention reads directly, therefore stay alone.
- Weights are held once: every reader of a weight is merged with the same others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Op, Value, live, substitute
from pliant.ir.ops import IN_MEMORY, OPS, VIEWS
from pliant.ir.same import attr_key
from pliant.ir.views import resolve
from pliant.passes.fuse import fuse
from pliant.passes.fuse_limits import reads_view
from pliant.passes.lifetimes import Kernels
from pliant.sym import as_expr

LINE = 64  # bytes
# Ops of an epilogue; a product that lacks one gets a neutral operand for it.
LINKS = frozenset({"add", "mul"})
# Ops that may compute a weight; `fold` evaluates all of them.
MADE_BY = VIEWS | {"constant", "full", "cast", "add", "mul"}


@dataclass(frozen=True, slots=True, eq=False)
class _MergedProduct:
    """A matmul by a constant, and the links of its epilogue."""

    matmul: Op
    links: tuple[Op, ...]  # cast, or add or mul with a row of constants
    kernel: int

    @property
    def end(self) -> Value:
        return self.links[-1].result if self.links else self.matmul.result

    @property
    def weight(self) -> Value:
        return self.matmul.operands[1]

    @property
    def columns(self) -> int:
        return self.weight.shape[-1].value


_Run = tuple[_MergedProduct, ...]


class _RunFinder:
    """Which products may be merged."""

    def __init__(self, graph: Graph, cx: Context) -> None:
        self.graph, self.cx = graph, cx
        self.facts = cx.facts(graph)
        self.producers, self.users = graph.producers(), graph.users()
        self.results = set(graph.results)

    def runs(self) -> list[_Run]:
        """Sets to merge, in program order."""
        matmuls = self._siblings()
        if not matmuls:
            return []
        kernels = Kernels(fuse(self.graph, self.cx))
        found: dict[Value, list[_MergedProduct]] = {}
        for op in matmuls:
            product = self._product(op, kernels)
            if product is not None:
                found.setdefault(op.operands[0], []).append(product)
        near = [run for many in found.values() for run in _near(many, kernels)]
        whole = [run for run in map(self._kept, near) if len(run) > 1]
        whole.sort(key=lambda run: run[0].kernel)
        alone = self._weights_held_once(whole)
        small = [self._fitting(run, kernels) for run in alone]
        return self._weights_held_once([run for run in small if len(run) > 1])

    # ---- one product

    def _siblings(self) -> list[Op]:
        """Products with constants whose left operand is shared by several of them.

        A weight with other readers, such as a tied embedding, stays as it is.
        """
        by_left: dict[Value, list[Op]] = {}
        for op in self.graph.ops:
            if op.name == "matmul" and self._is_weight(op.operands[1]):
                by_left.setdefault(op.operands[0], []).append(op)
        found = [op for many in by_left.values() if len(many) > 1 for op in many]
        readers = set(found)
        return [op for op in found if self._read_only_by(op.operands[1], readers)]

    def _is_weight(self, value: Value) -> bool:
        """Whether it is one matrix of constants whose columns fill cache lines."""
        if not all(d.is_const for d in value.shape):
            return False
        if any(d != as_expr(1) for d in value.shape[:-2]):
            return False
        row = value.shape[-1].value * value.dtype.bytes
        return (
            row > 0 and row % LINE == 0 and _behind(value, self.producers) is not None
        )

    def _product(self, matmul: Op, kernels: Kernels) -> _MergedProduct | None:
        """The product with its epilogue, if the epilogue can be merged."""
        kernel = kernels.of_root.get(matmul.result.name)
        if kernel is None or len(kernels.fusions[kernel].results) != 1:
            return None
        value, links = matmul.result, list[Op]()
        while value.name != kernels.fusions[kernel].results[0].name:
            readers = self.users.get(value, [])
            if len(readers) != 1 or not self._is_link(readers[0], value):
                return None
            links.append(readers[0])
            value = readers[0].result
        product = _MergedProduct(matmul, tuple(links), kernel)
        whole_lines = product.columns * value.dtype.bytes % LINE == 0
        return product if whole_lines else None

    def _is_link(self, op: Op, value: Value) -> bool:
        if op.name == "cast":
            return True
        if op.name not in LINKS:
            return False
        other = self.producers.get(_other_operand(op, value))
        return other is not None and (
            other.name == "full" or self._is_row(other, value)
        )

    def _is_row(self, op: Op, value: Value) -> bool:
        """Whether an op broadcasts one row of constants."""
        if op.name != "broadcast" or _behind(op.operands[0], self.producers) is None:
            return False
        last = op.operands[0].shape[-1:], op.ints_attr("axes")[-1:]
        row = op.operands[0].type.numel
        return last == (value.shape[-1:], (value.type.rank - 1,)) and row == last[0][0]

    # ---- several

    def _kept(self, run: Sequence[_MergedProduct]) -> _Run:
        """Those of a run whose epilogues agree and whose readers can read slices."""
        run = [product for product in run if not self._stays(product)]
        if not run:
            return ()
        longest = _longest_links(run)
        return tuple(product for product in run if _agree(product.links, longest))

    def _stays(self, product: _MergedProduct) -> bool:
        """Whether some reader needs this product's result on its own."""
        end = product.end
        if end in self.results:
            return True
        width = product.columns
        shape = (*end.shape[:-1], as_expr(2 * width))
        wide = Value("wide", end.type.with_shape(shape))
        zeros, ones = (as_expr(0),) * end.type.rank, (1,) * end.type.rank
        starts = (*zeros[:-1], as_expr(width))
        attrs = (("starts", starts), ("shape", end.shape), ("steps", ones))
        sliced = {**self.producers, end: Op("slice", (wide,), attrs, (end,))}
        stack = [end]
        while stack:
            value = stack.pop()
            for op in self.users.get(value, []):
                if op.name in VIEWS:
                    if op.result in self.results:
                        return True
                    stack.append(op.result)
                elif self._reads(op, value, self.producers) and not self._reads(
                    op, value, sliced
                ):
                    return True
        return False

    def _reads(self, op: Op, value: Value, producers: dict[Value, Op]) -> bool:
        """Whether an op reads a value in place, from its base."""
        view = resolve(value, producers, self.facts)
        if view is None:
            return False
        which = (k for k, operand in enumerate(op.operands) if operand is value)
        return op.name not in IN_MEMORY or all(reads_view(op, k, view) for k in which)

    def _weights_held_once(self, runs: list[_Run]) -> list[_Run]:
        """Runs that include all readers of their weights: layers may share weights."""
        taken = {_weights_of(run): set[Op]() for run in runs}
        for run in runs:
            taken[_weights_of(run)].update(product.matmul for product in run)
        return [
            run
            for run in runs
            if all(self._read_only_by(p.weight, taken[_weights_of(run)]) for p in run)
        ]

    def _read_only_by(self, weight: Value, matmuls: set[Op]) -> bool:
        """A scale or other small part of the weight may have other readers."""
        inside = _behind(weight, self.producers) or []
        allowed = matmuls.union(inside)
        whole = [
            op.result for op in inside if op.result.type.numel == weight.type.numel
        ]
        return all(reader in allowed for value in whole for reader in self.users[value])

    def _fitting(self, run: _Run, kernels: Kernels) -> _Run:
        """The first of a run, and those that can share a buffer with it."""
        taken = [run[0]]
        for product in run[1:]:
            names = [taken[0].end.name, product.end.name]
            makers = {p.kernel for p in (*taken, product)}
            if kernels.join(names, makers, self.facts):
                taken.append(product)
        return tuple(taken)


def _near(
    products: list[_MergedProduct], kernels: Kernels
) -> list[list[_MergedProduct]]:
    """Products with no other contraction between them.

    Keys and values that every layer computes from one encoder's result are read layer
    by layer. Merged, all of them would live from the first layer to the last.
    """
    left = products[0].matmul.operands[0].name
    others = [k for k, name in kernels.contractions if name != left]

    def before(product: _MergedProduct) -> int:
        return sum(k < product.kernel for k in others)

    ordered = sorted(products, key=lambda product: product.kernel)
    return [list(run) for _, run in groupby(ordered, before)]


def _agree(links: Sequence[Op], longest: Sequence[Op]) -> bool:
    """Whether the links are a prefix of `longest` and the rest can be neutral."""
    same = all(
        a.name == b.name and attr_key(a.attrs) == attr_key(b.attrs)
        for a, b in zip(links, longest, strict=False)
    )
    return same and all(op.name in LINKS for op in longest[len(links) :])


def _longest_links(run: Sequence[_MergedProduct]) -> tuple[Op, ...]:
    return max(run, key=lambda product: len(product.links)).links


def _weights_of(run: _Run) -> tuple[Value, ...]:
    return tuple(product.weight for product in run)


def _other_operand(op: Op, value: Value) -> Value:
    a, b = op.operands
    return b if a is value else a


def _behind(value: Value, producers: dict[Value, Op]) -> list[Op] | None:
    """The ops that compute a value from constants alone; None if others are needed."""
    found: dict[Op, None] = {}
    stack = [value]
    while stack:
        op = producers.get(stack.pop())
        if op is None or op.name not in MADE_BY:
            return None
        found[op] = None
        stack.extend(op.operands)
    return list(found)


class _MergeWriter:
    """Writes the graph with runs merged, each at the position of its first product."""

    def __init__(self, graph: Graph, runs: Sequence[_Run]) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.position = {op: k for k, op in enumerate(graph.ops)}
        self.builder = Builder.within(graph)
        self.written: set[Op] = set()  # emitted already, or replaced
        self.replaced: dict[Value, Value] = {}
        self.weights: dict[tuple[Value, ...], Value] = {}
        self.first: dict[Op, _Run] = {}
        for run in runs:
            self.written.update(op for p in run for op in (p.matmul, *p.links))
            first = min((p.matmul for p in run), key=self.position.__getitem__)
            self.first[first] = run

    def write(self) -> Graph:
        for op in self.graph.ops:
            if op in self.first:
                with self.builder.at(op.loc):
                    self._merge(self.first[op])
            elif op not in self.written:
                self.written.add(op)
                self.builder.append(substitute(op, self.replaced))
        return live(self.graph.replace(ops=tuple(self.builder.ops)))

    def _merge(self, run: _Run) -> None:
        builder = self.builder
        weight = self.weights.get(_weights_of(run))
        if weight is None:
            weight = self.weights[_weights_of(run)] = self._weight(run)
        left = self.replaced.get(run[0].matmul.operands[0], run[0].matmul.operands[0])
        value = builder.emit("matmul", left, weight)
        for depth, op in enumerate(_longest_links(run)):
            if op.name == "cast":
                value = builder.cast(value, op.dtype_attr("dtype"))
            else:
                rows = [self._row(p, depth, op) for p in run]
                row = builder.concat(rows, 0)
                wide = builder.broadcast(row, value.shape, [value.type.rank - 1])
                value = builder.emit(op.name, value, wide)
        start = 0
        for product in run:
            part = builder.slice_axis(value, -1, start, product.columns)
            self.replaced[product.end] = part
            start += product.columns

    def _weight(self, run: _Run) -> Value:
        """The weights side by side; stored by columns if all of them are."""
        builder = self.builder
        given = [self._constant(product.weight) for product in run]
        stored = [self._transposed(value) for value in given]
        by_columns = [value for value in stored if value is not None]
        if len(by_columns) < len(given):
            return builder.concat(given, -1)
        transposed = builder.transpose(builder.concat(by_columns, 0), (1, 0))
        return builder.reshape(transposed, (*given[0].shape[:-2], *transposed.shape))

    def _transposed(self, weight: Value) -> Value | None:
        """The matrix whose transpose a weight is."""
        op = self.producers[weight]
        if op.name == "reshape" and op.operands[0].shape == weight.shape[-2:]:
            op = self.producers[op.operands[0]]
        transposed = op.name == "transpose" and op.ints_attr("perm") == (1, 0)
        return op.operands[0] if transposed else None

    def _row(self, product: _MergedProduct, depth: int, like: Op) -> Value:
        """The operand of the link at this depth, as a row for one product."""
        builder, shape = self.builder, (product.columns,)
        if depth >= len(product.links):
            nothing = OPS[like.name].neutral
            assert nothing is not None
            return builder.full(nothing, like.result.dtype, shape)
        before = product.links[depth - 1] if depth else product.matmul
        other = _other_operand(product.links[depth], before.result)
        op = self.producers[other]
        if op.name == "full":
            number = op.attr("value")
            assert isinstance(number, (int, float))
            return builder.full(number, other.dtype, shape)
        return builder.reshape(self._constant(op.operands[0]), shape)

    def _constant(self, value: Value) -> Value:
        """The value, after emitting the ops that compute it."""
        ops = _behind(value, self.producers) or []
        for op in sorted(ops, key=self.position.__getitem__):
            if op not in self.written:
                self.written.add(op)
                self.builder.append(op)
        return value


def merge(graph: Graph, cx: Context) -> Graph:
    """Merges products of one left operand by constants, where nothing is lost."""
    runs = _RunFinder(graph, cx).runs()
    return _MergeWriter(graph, runs).write() if runs else graph
