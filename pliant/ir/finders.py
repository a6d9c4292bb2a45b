"""Ops that find a size which data decide: the first dim of their result."""

from __future__ import annotations

from pliant.ir.graph import Op
from pliant.sym import Expr

FINDERS = frozenset({"nonzero", "extent"})


def size_of(finder: Op) -> str:
    """The name of the size."""
    size = finder.result.shape[0].symbol
    assert size is not None
    return size


def most_of(finder: Op) -> Expr:
    """The most that it can be."""
    if finder.name == "extent":
        return finder.dim_attr("most")
    return finder.operands[0].type.numel
