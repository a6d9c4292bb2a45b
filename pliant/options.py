"""The off switches: every optimisation can be left out, to measure it or to bisect.

Which stage reads which switch is in the table of stages (pipeline.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Options:
    """What the compiler may do; all of it unless a switch is off."""

    constraints: bool = True  # use proved dim and product equalities in fusion
    fuse: bool = True  # several ops in one kernel
    fewest: bool = True  # a product's kernel takes the ops that leave it least to write
    prologue: bool = True  # what a product reads may be computed in its kernel
    attention: bool = True  # one kernel; off: spelled out as matmul, softmax, matmul
    fold: bool = True  # compute what depends on weights alone at compile time
    absorb: bool = True  # scales and shifts by constants go into the weights
    coded: bool = True  # weights in few bits are decoded in their product's kernel
    merge: bool = True  # products that share their left operand become one
    layout: bool = True  # convolutions keep channels last where that pays
    direct: bool = True  # windows for few channels are read where they lie, not copied
    share: bool = True  # generate identical kernels once
    variants: bool = True  # several bodies of a kernel, chosen by guards on the sizes
    packing: bool = True  # weights of products are held in the order they are read in
    patching: bool = True  # rows cut into even tiles; off: whole ones, then the rest
    strips: bool = True  # small products by strips of rows, without a plan
    vectors: bool = True  # iterations side by side in lanes; off: one after another
    order: bool = True  # calls run in an order in which little memory is live
    inplace: bool = True  # results may be written over inputs that die
    chunk: bool = True  # inside a limit, parts run in chunks of rows
    remat: bool = True  # inside a limit, values are computed again or spilled
    recompute: bool = True  # training: elementwise values not kept for the way back
    update: bool = True  # parameters and buffers updated in place; off: copied

    def are_on(self, names: tuple[str, ...]) -> bool:
        return all(getattr(self, name) for name in names)


SWITCHES = tuple(field.name for field in fields(Options))


@dataclass(frozen=True, slots=True)
class Instruments:
    """What the compiler checks and measures beside its work; results are the same."""

    verify: bool = True  # check the IR after every stage
    profile: bool = False  # calls keep the time of each kernel, for `profile`
    keep_ir: bool = False  # the module after every stage is kept as text, for `report`
