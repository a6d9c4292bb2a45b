"""The plans that a compiled product can run: every one gives the same result.

A plan is what `kernels/choose.py` decides: rows of a block, panels of a group, passes
over K, whether B is packed and A copied, or strips of rows instead of all that. The
scratch that kernels/gemm.py lays out bounds them: packed panels hold `tile.depth` steps
of K and `tile.cells` of all panels of a group, partial sums of several passes
`SWEPT_ROWS` rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

from pliant.kernels.choose import SWEPT_ROWS
from pliant.kernels.mix import Cut
from pliant.kernels.tiles import Tile

DOT_LIMIT = 64  # columns, or rows, for which lanes along K are tried
TILES = (1, 2, 4, 12, 24, 72)  # of a block
DEPTHS = (32, 64, 128, 256, 512, 1024, 2048)
WIDTHS = (1, 4, 8, 16)  # of a group, in panels


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


def picked(cut: Cut) -> CandidatePlan:
    """The plan that the compiler's choice is."""
    if cut.dot:
        return DOT
    fields = asdict(cut)
    return CandidatePlan(**{name: fields[name] for name in CandidatePlan.__slots__})


@dataclass(frozen=True, slots=True)
class Set:
    """What may be done for one shape."""

    m: int
    n: int
    k: int
    threads: int
    constant: bool  # B is packed ahead
    tile: Tile

    def plans(self) -> Iterator[CandidatePlan]:
        """Every one that is legal, some of them twice."""
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
        """By strips of rows: so many blocks, groups of so many panels."""
        panels = max(1, -(-self.n // self.tile.NR))
        groups = -(-panels // width)
        shares = (blocks, -(-self.m // blocks), groups, -(-panels // groups))
        return CandidatePlan(0, 1, 0, 0, 1, self.k, *shares, 0)

    def heights(self) -> set[int]:
        """Rows of a block."""
        tiles = {self.tile.MR * count for count in TILES}
        shares = {-(-self.m // count) for count in (1, self.threads)}
        return {min(rows, self.m) for rows in tiles | shares}

    def widths(self) -> set[int]:
        """Panels of a group."""
        panels = max(1, -(-self.n // self.tile.NR))
        return {min(width, panels) for width in (*WIDTHS, panels)}

    def pass_counts(self) -> set[int]:
        return {1, *(-(-self.k // depth) for depth in DEPTHS)} - {0}

    def plan(
        self, packed: int, passes: int, rows: int, width: int, swath: int
    ) -> CandidatePlan:
        """With parts as even as can be."""
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
        """Whether it fits the scratch, and differs from another that is in the set."""
        tile, several = self.tile, plan.passes > 1
        # The last panel is packed always if it is not whole.
        partial = not self.constant and self.n % tile.NR > 0
        if (plan.packed or partial) and plan.depth > tile.depth:
            return False
        if plan.packed and plan.depth * plan.panels > tile.cells:
            return False
        if several and plan.rows > SWEPT_ROWS:
            return False
        # In one pass over what is not packed, a group of panels that each meet all
        # rows is but a share of a thread.
        shares = plan.packed or several or self.threads > 1 or plan.swath == 1
        return bool(shares) or plan.panels == 1
