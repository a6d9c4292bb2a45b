"""The plans that a compiled product can run; all give the same result.

A plan is what `kernels/choose.py` decides: rows of a block, panels of a group, passes
over K, whether B is packed and A copied, or strips of rows instead. The scratch that
kernels/gemm.py allocates limits them: packed panels hold `tile.depth` steps of K and
`tile.cells` over all panels of a group, partial sums of several passes `SWEPT_ROWS`
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

from pliant.kernels.choose import SWEPT_ROWS
from pliant.kernels.mix import ProductCut
from pliant.kernels.tiles import Tile

DOT_LIMIT = 64  # up to this many columns, or rows, lanes along K are tried
TILES = (1, 2, 4, 12, 24, 72)  # tiles of a block
DEPTHS = (32, 64, 128, 256, 512, 1024, 2048)
WIDTHS = (1, 4, 8, 16)  # panels of a group


@dataclass(frozen=True, slots=True, order=True)
class CandidatePlan:
    """One plan for a shape; the fields are those of `choose.Plan`."""

    dot: int
    strips: int
    packed: int
    copied: int
    passes: int
    depth: int
    blocks: int
    rows: int
    groups: int
    panels: int
    swath: int

    def __str__(self) -> str:
        if self.dot:
            return "dot"
        told = [
            f"{self.blocks} x {self.rows} rows",
            f"{self.groups} x {self.panels} panels",
            f"{self.passes} x {self.depth} steps",
            f"{self.swath} tiles",
        ]
        told += ["packed"] * self.packed + ["copied"] * self.copied
        told += ["by strips"] * self.strips
        return ", ".join(told)


DOT = CandidatePlan(1, *(0,) * 10)


def picked(cut: ProductCut) -> CandidatePlan:
    """The plan that the compiler's choice amounts to."""
    if cut.dot:
        return DOT
    fields = asdict(cut)
    return CandidatePlan(**{name: fields[name] for name in CandidatePlan.__slots__})


@dataclass(frozen=True, slots=True)
class Set:
    """The legal plans for one shape."""

    m: int
    n: int
    k: int
    threads: int
    constant: bool  # B is packed at compile time
    tile: Tile

    def plans(self) -> Iterator[CandidatePlan]:
        """Every legal plan, some of them twice."""
        if min(self.m, self.n) <= DOT_LIMIT:
            yield DOT
        for blocks, width in product((1, self.threads), self.widths()):
            yield self.strips(blocks, width)
        packs = (0,) if self.constant else (0, 1)
        for packed, rows, passes in product(packs, self.heights(), self.pass_counts()):
            tiles = -(-rows // self.tile.MR)
            for width, swath in product(self.widths(), {1, tiles}):
                plan = self.plan(packed, passes, rows, width, swath)
                if self.legal(plan):
                    yield plan

    def strips(self, blocks: int, width: int) -> CandidatePlan:
        """Strips of rows: this many blocks, groups of `width` panels."""
        panels = max(1, -(-self.n // self.tile.NR))
        groups = -(-panels // width)
        shares = (blocks, -(-self.m // blocks), groups, -(-panels // groups))
        return CandidatePlan(0, 1, 0, 0, 1, self.k, *shares, 0)

    def heights(self) -> set[int]:
        """The numbers of rows of a block to try."""
        tiles = {self.tile.MR * count for count in TILES}
        shares = {-(-self.m // count) for count in (1, self.threads)}
        return {min(rows, self.m) for rows in tiles | shares}

    def widths(self) -> set[int]:
        """The numbers of panels of a group to try."""
        panels = max(1, -(-self.n // self.tile.NR))
        return {min(width, panels) for width in (*WIDTHS, panels)}

    def pass_counts(self) -> set[int]:
        return {1, *(-(-self.k // depth) for depth in DEPTHS)} - {0}

    def plan(
        self, packed: int, passes: int, rows: int, width: int, swath: int
    ) -> CandidatePlan:
        """A plan with parts as even as possible."""
        panels = -(-self.n // self.tile.NR)
        blocks, groups = -(-self.m // rows), -(-panels // width)
        return CandidatePlan(
            0,
            0,
            packed,
            0,
            passes,
            -(-self.k // passes),
            blocks,
            -(-self.m // blocks),
            groups,
            -(-panels // groups),
            swath,
        )

    def legal(self, plan: CandidatePlan) -> bool:
        """Whether it fits the scratch, and differs from the others in the set."""
        tile, several = self.tile, plan.passes > 1
        # The last panel is always packed if it is partial.
        partial = not self.constant and self.n % tile.NR > 0
        if (plan.packed or partial) and plan.depth > tile.depth:
            return False
        if plan.packed and plan.depth * plan.panels > tile.cells:
            return False
        if several and plan.rows > SWEPT_ROWS:
            return False
        # In one pass over unpacked panels that each pass over all rows, a group only
        # decides how threads divide the work.
        shares = plan.packed or several or self.threads > 1 or plan.swath == 1
        return bool(shares) or plan.panels == 1
