"""The plan of one matrix product as numbers and as text, for sizes of interest.

    M=7 N=768 K=3072: rows 7, columns 24 x 32; 1 pass, B packed ahead, 2 threads by
    panels

Rows and columns are the mix of micro-kernels that covers them: 15 rows are 8 + 7, and
50 columns are 3 x 16 + 8 where a panel is 16 wide and a vector 8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pliant.kernels.choose import (
    Plan,
    StripCut,
    row_tiles,
    strip_tiles,
    unit_grain,
)
from pliant.kernels.dots import DOT_TILE
from pliant.kernels.gemm import small_sizes
from pliant.kernels.micro import DOT_HEIGHTS, DOT_WIDTHS
from pliant.kernels.product import Product
from pliant.kernels.tiles import Tile
from pliant.sym import Expr, as_expr, product


@dataclass(frozen=True, slots=True)
class ProductCut:
    """How a product of known sizes is cut; the fields are those of `Plan`."""

    batch: int
    m: int
    n: int
    k: int
    dot: int
    strips: int  # 1: by strips of rows, see kernels/strips.py
    packed: int
    copied: int
    passes: int
    depth: int
    blocks: int
    rows: int
    groups: int
    panels: int
    swath: int
    height: int  # most rows of a tile
    threads: int  # number of threads that take part

    def block_rows(self) -> list[int]:
        """The number of rows of every block that is not empty."""
        starts = range(0, self.m, max(self.rows, 1))
        return [min(self.rows, self.m - start) for start in starts]

    def units(self) -> tuple[tuple[str, int], ...]:
        """The units that threads divide, outermost first."""
        counts = (self.batch, self.blocks, self.groups)
        return tuple(zip(("products", "rows", "panels"), counts, strict=True))


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """A product that a kernel computes, and the plan that it evaluates."""

    spec: Product
    plan: Plan
    tile: Tile
    strips: StripCut | None = None  # None: strips never compute it

    def at(self, dims: Mapping[str, int], threads: int) -> ProductCut:
        """The plan that the kernel chooses for these sizes."""
        spec, tile = self.spec, self.tile
        known = {**dims, "threads": threads}
        m, n, k = (size.evaluate(known) for size in (spec.m, spec.n, spec.k))
        batch = product(spec.batch).evaluate(known)
        fields = {"strips": 0, "height": tile.MR} | self.plan.at(known)
        limits = small_sizes(spec, tile, self.strips is not None)
        small = all(size.evaluate(known) <= most for size, most in limits)
        one_pass = {"packed": 0, "copied": 0, "passes": 1, "depth": k}
        unit = None
        if fields["dot"]:
            blocks, groups = -(-m // DOT_TILE), -(-n // tile.NR)
            fields |= {"blocks": blocks, "rows": min(m, DOT_TILE)} | one_pass
            fields |= {"groups": groups, "panels": 1}
            unit = (min(n, tile.NR), DOT_TILE)
        elif self.strips is not None and (small or self.strips.wanted.evaluate(known)):
            fields |= {"strips": 1} | one_pass
            alone = {"blocks": 1, "rows": m, "groups": 1}
            alone |= {"panels": max(1, -(-n // tile.NR))}
            fields |= alone if small else self.strips.at(known)
            # A number of rows that every height of tile divides.
            rows = tile.MR * tile.low * tile.broad
            tiles = strip_tiles(as_expr(rows), spec.m, spec.n, spec.k, tile)
            fields["height"] = rows // tiles.evaluate(known)
            if small and m <= tile.MR and n <= tile.NR:  # not cut at all
                fields["height"] = tile.MR
            elif k == 1 and n > tile.lanes:
                fields["height"] = 1
        elif small:
            uncut = self.plan.uncut(spec.m, spec.n, spec.k, tile)
            fields |= {name[1:]: size.evaluate(known) for name, size in uncut.items()}
        unit = unit or (fields["rows"], fields["panels"] * tile.NR)
        units = batch * fields["blocks"] * fields["groups"]
        grain = unit_grain(*(as_expr(size) for size in (*unit, k))).value
        used = 1 if small else max(1, min(threads, units // grain))
        return ProductCut(batch, m, n, k, **fields, threads=used)

    def sizes(self) -> dict[str, Expr]:
        spec = self.spec
        sizes = {"M": spec.m, "N": spec.n, "K": spec.k}
        return sizes | ({"products": product(spec.batch)} if spec.batch else {})

    def describe(self, dims: Mapping[str, int], threads: int) -> str:
        cut = self.at(dims, threads)
        return f"M={cut.m} N={cut.n} K={cut.k}: {self.words(cut)}"

    def words(self, cut: ProductCut) -> str:
        """The plan as text."""
        if 0 in (cut.batch, cut.m, cut.n):
            return "nothing to compute"
        rows, columns = self.rows(cut), self.columns(cut)
        return f"rows {rows}, columns {columns}; {', '.join(self.parts(cut))}"

    def rows(self, cut: ProductCut) -> str:
        """Heights of the tiles, per block where there are several."""
        if cut.dot:
            return sizes_text(dot_sizes(cut.m, DOT_HEIGHTS))
        blocks = Counter(cut.block_rows())
        mixes = [(n, sizes_text(row_tiles(r, cut.height))) for r, n in blocks.items()]
        if len(cut.block_rows()) == 1:
            return mixes[0][1]
        return " + ".join(f"{n} x ({mix})" if n > 1 else f"({mix})" for n, mix in mixes)

    def columns(self, cut: ProductCut) -> str:
        """Widths of the tiles, unused lanes included."""
        if cut.dot:
            return sizes_text(dot_sizes(cut.n, DOT_WIDTHS))
        whole, left = divmod(cut.n, self.tile.NR)
        lanes = self.tile.lanes
        widths = [self.tile.NR] * whole
        return sizes_text([*widths, -(-left // lanes) * lanes] if left else widths)

    def parts(self, cut: ProductCut) -> list[str]:
        """What happens besides the tiles, in a few words each."""
        told = [f"{cut.batch} products"] if cut.batch != 1 else []
        if cut.dot:
            told.append("lanes along K")
            if not self.rows_lie() and cut.n > 1:
                told.append("columns of B made rows")
        else:
            told += self.blocks(cut)
        shared = [name for name, count in shared_units(cut) if count > 1]
        by = f" by {' and '.join(shared)}" if cut.threads > 1 else ""
        return [*told, f"{count_text(cut.threads, 'thread')}{by}"]

    def blocks(self, cut: ProductCut) -> list[str]:
        told = ["strips of rows"] if cut.strips else []
        told.append(count_text(cut.blocks, "block"))
        if cut.panels > 1 and cut.groups > 1:
            told.append(f"{cut.panels} panels at a time")
        passes = "1 pass"
        if cut.passes > 1:
            passes = f"{cut.passes} passes of {cut.depth}"
        told.append(passes)
        if self.spec.b_strides is None:
            told.append("B packed ahead")
        else:
            told.append("B packed" if cut.packed else "B in place")
        if self.spec.computed:
            told.append("A computed")
        elif cut.copied:
            told.append("A copied")
        return told

    def rows_lie(self) -> bool:
        """Whether B is contiguous in K in place."""
        strides = self.spec.b_strides
        return strides is not None and strides[-2] == as_expr(1)


def shared_units(cut: ProductCut) -> list[tuple[str, int]]:
    """The outermost units, as many as it takes to give every thread one."""
    told: list[tuple[str, int]] = []
    for name, count in cut.units():
        told.append((name, count))
        if count > 1 and count % cut.threads == 0:
            break
    return told


def dot_sizes(extent: int, sizes: Sequence[int]) -> list[int]:
    """7 is 4, then 3, if there is a kernel of size 3."""
    found: list[int] = []
    for size in sizes:
        count, extent = divmod(extent, size)
        found += [size] * count
    return found


def sizes_text(sizes: Sequence[int]) -> str:
    """Equal sizes are printed once, with their count: 2 x 14 + 13."""
    counts = Counter(sizes)
    return " + ".join(f"{n} x {s}" if n > 1 else str(s) for s, n in counts.items())


def count_text(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
