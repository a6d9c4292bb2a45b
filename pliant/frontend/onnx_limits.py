"""What a file may ask for before it is refused, however small the file is.

Functions that call functions and loops that are written out can grow without end, and
so can sizes that are multiplied with themselves. A model that is real stays far below
all of these; one that does not is a ModelError, before it takes hours or all memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pliant.errors import ModelError
from pliant.ir.graph import Value
from pliant.sym import Expr

NODES = 50_000  # translated, each time that a function or a round is written out
OPS = 200_000  # of the IR, in one graph or region
LARGEST = 2**48  # bytes of a tensor that is believed
DENSE = 2**31  # elements that a sparse tensor is written out to
TERMS = 200  # of a size, as a polynomial
DEGREE = 64
COEFFICIENT = 2**62
# Attributes that count something, or are steps: rules divide by them.
COUNTS = (
    *("group", "offset_group", "num_groups", "num_heads", "kv_num_heads"),
    *("q_num_heads", "hidden_size", "num_outputs", "blocksize", "block_size"),
    *("strides", "dilations", "kernel_shape", "p", "size", "K", "N", "bits"),
)
OPTIONAL_COUNTS = {"QuantizeLinear": "block_size", "DequantizeLinear": "block_size"}
OUTPUTS = 2**14  # of one node, and parts of a tensor
RANK = 64


def is_plain(size: Expr) -> bool:
    """Whether a size is one that arithmetic goes on with."""
    if len(size.terms) > TERMS:
        return False
    return all(
        abs(factor) <= COEFFICIENT and sum(power for _, power in parts) <= DEGREE
        for factor, parts in size.terms
    )


def product_is_plain(a: Expr, b: Expr) -> bool:
    """Whether a product may be computed at all."""
    return len(a.terms) * len(b.terms) <= TERMS


def check_counts(op: str, attrs: Mapping[str, Any]) -> None:
    """ModelError for an attribute below 1 that must not be."""
    for name in COUNTS:
        given = attrs.get(name)
        numbers = given if isinstance(given, list) else [given]
        least = 0 if OPTIONAL_COUNTS.get(op) == name else 1
        for number in numbers:
            if isinstance(number, int | float) and number < least:
                raise ModelError(
                    f"{op} has {name} = {number}, and {least} is the least"
                )


def check_tensors(values: Iterable[Value], what: str) -> None:
    """ModelError for a tensor that no machine holds."""
    for value in values:
        if value.type.rank > RANK:
            raise ModelError(f"{what} gives a tensor of {value.type.rank} dims")
        fixed = value.dtype.bytes
        for dim in value.shape:
            if not is_plain(dim):
                raise ModelError(f"{what} gives a tensor that is too large")
            fixed *= max(_least(dim), 1)
        if fixed > LARGEST:
            raise ModelError(f"{what} gives a tensor that is too large: {value.type}")


def _least(dim: Expr) -> int:
    """What divides a size: it is at least that, or 0, or of another sign."""
    if dim.is_const:
        return dim.value
    return dim.terms[0][0] if len(dim.terms) == 1 else 1
