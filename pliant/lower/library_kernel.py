"""How a C function of pliant/library/ is called: the form of a row.

lower/library.py and its neighbours have the rows, one for each op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pliant.ir.graph import Op
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr

# enum plt_dtype (library.h)
CODES = {dtype: as_expr(number) for number, dtype in enumerate(DType)}


@dataclass(frozen=True, slots=True)
class Workspace:
    """Workspace: bytes of one worker, and the units that workers share.

    `shared` bytes more are for all workers, an argument behind the others.
    """

    bytes: Expr
    units: Expr
    shared: Expr | None = None


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """A C function and its arguments for an op.

    A function that may find data it cannot work with takes the number of a check, in
    front of the size of number `checks`; 0 if nothing is to be raised. The message is
    the op's attribute `error`, or the same for every op.
    """

    symbol: str
    sizes: Callable[[Op], tuple[Expr, ...]]
    work: Callable[[Op], Workspace] | None = None
    checks: int | None = None
    error: str = ""

    def message(self, op: Op) -> str:
        own = dict(op.attrs).get("error", "")
        return self.error or str(own)


def flag(op: Op, name: str) -> Expr:
    return as_expr(int(op.bool_attr(name)))


def code(op: Op) -> Expr:
    return CODES[op.operands[0].dtype]
