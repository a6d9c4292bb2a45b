"""In-place ops made functional: a write to a view reaches its base, and back.

    a = x[:, 1:]; a += 1; y = x * 2      a' = a + 1
                                         x' = concat(x[:, :1], a')
                                         y  = x' * 2

A tensor node that shares memory with an operand has that operand as its parent. A write
replaces the node's value, is propagated up to the root by inverting each view, and
every other view of the root is then recomputed.

Whether reshape, flatten or contiguous copy depends on sizes (torch_layout.py):
x.mT.reshape(-1) copies, but is a view of x if x has one row. Where a write would be
visible through such a view, this is a branch on a size, like those of the model's own
code. It depends on the strides of inputs too, so calls must pass those of the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node

from pliant.frontend.contract import Basis
from pliant.frontend.torch_layout import answer, depends_on_layout
from pliant.frontend.torch_ops_complex import Complex
from pliant.frontend.torch_ops_context import TorchContext
from pliant.frontend.torch_ops_shape import moved_axes, swap_axes
from pliant.frontend.torch_ops_window import (
    from_front,
    put_window,
    select_window,
    slice_window,
    split_windows,
)
from pliant.frontend.torch_views import name_of
from pliant.ir.graph import Value
from pliant.sym import Guard, as_expr

aten = torch.ops.aten

# Views of every layout; the other aliasing ops may copy.
_ALWAYS = frozenset(
    [
        "view",
        "view_as",
        "unsqueeze",
        "squeeze",
        "permute",
        "transpose",
        "t",
        "mT",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "numpy_T",
        "adjoint",
        "slice",
        "select",
        "narrow",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "expand",
        "expand_as",
        "broadcast_to",
        "detach",
        "alias",
        "unfold",
        "diagonal",
        "unflatten",
    ]
)
_RESHAPES = frozenset(
    [
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "flatten",
        "ravel",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "contiguous",
        "detach",
        "alias",
        "to",
        "type_as",
        "_unsafe_view",
        "lift_fresh",
    ]
)
_OTHER_TWINS = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
}
# These give their operand itself, unless they are to drop something.
_DROPOUTS = frozenset(
    ["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"]
)
# In-place ops whose result has the operand's memory, but another shape.
_RESIZES = frozenset(["resize_", "resize_as_"])


def is_in_place(target: Any) -> bool:
    """An overload such as add_ that writes its first operand."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    arguments = target._schema.arguments
    first = arguments[0].alias_info if arguments else None
    return first is not None and first.is_write and name_of(target).endswith("_")


def _gives_operand(target: Any) -> bool:
    """An in-place op whose result is its operand, as it is then."""
    return is_in_place(target) and name_of(target) not in _RESIZES


def functional_twin(target: Any) -> Any:
    """aten.add_.Tensor -> aten.add.Tensor; None if there is none."""
    if not is_in_place(target):
        return None
    if target in _OTHER_TWINS:
        return _OTHER_TWINS[target]
    packet = getattr(aten, name_of(target)[:-1], None)
    return getattr(packet, target._overloadname, None)


def shares_memory(node: Node) -> Node | None:
    """The operand whose memory this node's result is part of."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, Node)
        if not isinstance(source.target, torch._ops.OpOverload):
            return None  # control flow
        if source.args and isinstance(source.args[0], list | tuple):
            return _same_storage(node, source.args[0])
        if name_of(source.target) not in _ALWAYS:
            return _same_storage(node, source.args[:1])
        return source if shares_memory(source) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, Node):
        return None
    ours, theirs = _first(node.meta.get("val")), source.meta.get("val")
    if ours is None or not isinstance(theirs, torch.Tensor):
        return None
    if is_in_place(node.target) or _storage(ours) == _storage(theirs):
        return source
    if name_of(node.target) in _DROPOUTS:
        chance, train = node.args[1], node.args[2]
        return None if chance and train else source
    returns = node.target._schema.returns
    if not returns or returns[0].alias_info is None or ours.dtype != theirs.dtype:
        return None
    if name_of(node.target) in _ALWAYS:
        return source
    # A saved program has lost its storages: these copy unless contiguous.
    copies = node.kwargs.get("copy", False) or not _contiguous(theirs)
    return None if copies else source


def _same_storage(node: Node, given: Sequence[Any]) -> Node | None:
    """Which operand a result is a view of: meshgrid, dropout that drops nothing."""
    ours = node.meta.get("val")
    if not isinstance(ours, torch.Tensor):
        return None
    for other in given:
        if not isinstance(other, Node):
            continue
        theirs = other.meta.get("val")
        if isinstance(theirs, torch.Tensor) and _storage(ours) == _storage(theirs):
            return other
    return None


def _first(val: Any) -> torch.Tensor | None:
    if isinstance(val, list | tuple) and val:
        val = val[0]
    return val if isinstance(val, torch.Tensor) else None


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _contiguous(tensor: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(
        reversed(tensor.shape), reversed(tensor.stride()), strict=True
    ):
        if str(stride) != str(expected) and str(size) != "1":
            return False
        expected = expected * size
    return True


class Nodes(Protocol):
    """The walk over a graph, as far as writes concern it."""

    cx: TorchContext
    env: dict[Node, Any]
    lazy: dict[Node, Callable[[], Any]]  # weights that are not read yet
    buffers: dict[Node, str]  # weights that a call may change
    written: dict[Node, str]  # those that it did
    inputs: dict[Node, int]  # arguments that a call may change, by slot
    overwritten: dict[Node, int]  # those that it did
    laid_out: set[Node]  # those of which a call must pass the strides of the trace

    def read(self, node: Node) -> Any: ...

    def resolve(self, argument: Any) -> Any: ...

    def translate(self, node: Node) -> Any: ...


class Aliases:
    """The nodes seen so far that share memory, as trees.

    A write updates the nodes above, up to the root, and no others: a view is recomputed
    when it is next read, if its memory has been written since. So the cost of a write
    does not grow with the number of views.
    """

    def __init__(self, walk: Nodes) -> None:
        self.walk, self.cx, self.env = walk, walk.cx, walk.env
        self.parent: dict[Node, Node] = {}
        self.roots: dict[Node, Node] = {}
        self.writes: dict[Node, int] = {}  # to a root's memory
        self.made: dict[Node, int] = {}  # after how many of them a node was
        # Nodes that are views or copies of others, as sizes and strides have it; the
        # parts of trees that they link; and those of which it is guarded.
        self.links: dict[Node, Node] = {}
        self.parts: dict[Node, Node] = {}
        self.members: dict[Node, list[Node]] = {}
        self.beside: dict[Node, list[tuple[Node, Node]]] = {}
        self.settled: set[Node] = set()

    def track(self, node: Node) -> None:
        source = shares_memory(node)
        operand = depends_on_layout(node)
        if operand is not None:
            self._link(node, operand)
        if source is None:
            return
        # An in-place op gives its operand: trees do not grow deeper with each.
        above = self.parent.get(source)
        if above is not None and _gives_operand(source.target):
            source = above
        self.parent[node] = source
        root = self.roots[node] = self.root(source)
        self.made[node] = self.writes.get(root, 0)
        if operand is None:
            part = self.parts[node] = self.part(source)
            self.members.setdefault(part, []).append(node)

    def _link(self, node: Node, operand: Node) -> None:
        self.links[node] = operand
        part = self.part(operand)
        self.beside.setdefault(part, []).append((node, node))
        self.beside.setdefault(node, []).append((node, part))

    def part(self, node: Node) -> Node:
        return self.parts.get(node, node)

    def root(self, node: Node) -> Node:
        return self.roots.get(node, node)

    def refresh(self, node: Node) -> None:
        """Makes a view again if its memory was written since it was made."""
        if node not in self.parent:
            return
        writes = self.writes.get(self.roots[node], 0)
        if self.made[node] == writes:
            return
        self.made[node] = writes
        before, loc = self.cx.node, self.cx.b.loc
        self.env[node] = self._again(node)
        self.cx.node, self.cx.b.loc = before, loc

    def check_writable(self, node: Node) -> None:
        root = self.root(node)
        if root in self.walk.buffers or root in self.walk.inputs:
            return
        if root in self.walk.lazy:
            self.cx.unsupported(
                f"changes {root.name} in place, which is no buffer of the module: "
                "state that lasts from call to call must be registered as a buffer"
            )
        if root.op == "placeholder":
            self.cx.unsupported(f"changes the input {root.name} in place")

    def write(self, node: Node, new: Value | Complex) -> None:
        """`node` now holds `new`, and so does all that shares its memory."""
        root = self.root(node)
        if root in self.walk.buffers:
            self.walk.written[root] = self.walk.buffers[root]
        if root in self.walk.inputs:
            self.walk.overwritten[root] = self.walk.inputs[root]
        self.writes[root] = self.writes.get(root, 0) + 1
        if self.links and self.cx.node is not None:
            self._settle_layouts(node, self.cx.node)
        self._set(node, new)
        for other in self.parent:  # of several operands: neither put back nor redone
            if other.target is operator.getitem and self.root(other) is root:
                source = other.args[0]
                if self.parent[other] is not source and isinstance(source, Node):
                    name = name_of(source.target)  # type: ignore[arg-type]  # an op
                    self.cx.unsupported(f"in-place change of what {name} gave views of")
        while node in self.parent:
            above = self.parent[node]
            if node.target is operator.getitem:
                pieces = list(self.env[above])
                which: Any = node.args[1]
                pieces[which] = new
                self._set(above, pieces)
                new = self._put_piece(above, which, new)
                above = self.parent[above]
            else:
                new = self._undo(node, self.env[above], new)
            self._set(above, new)
            node = above

    def _settle_layouts(self, written: Node, at: Node) -> None:
        """Guards that views and copies are those of the trace, if a write shows it.

        Parts of the trees that such nodes link are looked at from the written one on.
        """
        start = self.part(written)
        found: dict[Node, tuple[Node, Node] | None] = {start: None}  # from where, how
        for part in (pending := [start]):
            for link, other in self.beside.get(part, ()):
                if other not in found:
                    found[other] = part, link
                    pending.append(other)
        shown: set[Node] = set()
        for part in reversed(pending):
            before = found[part]
            if before is not None and (part in shown or self._is_read_after(part, at)):
                shown.add(before[0])
                self._settle(before[1])

    def _is_read_after(self, part: Node, at: Node) -> bool:
        """Whether the memory of a part is read after a node, or outlives the call."""
        if part.op != "call_function":
            return True
        family = (part, *self.members.get(part, ()))
        return any(at < user for node in family for user in node.users)

    def _settle(self, link: Node) -> None:
        """Guards that a node is a view, or a copy, as it is in the trace."""
        if link in self.settled:
            return
        self.settled.add(link)
        assert isinstance(link.target, torch._ops.OpOverload)
        source, is_view, name = (
            self.links[link],
            link in self.parent,
            name_of(link.target),
        )
        found = answer(link, source, self.cx.symbols, self.cx.b.facts)
        if found is None or found.is_view != is_view:
            self.cx.unsupported(f"in-place change beside what {name} may copy")
        if found.by_strides:
            self._settle_strides(source)
        what = f"{name} beside an in-place change is a {'view' if is_view else 'copy'}"
        for cond in found.conds:
            message = (f"{what} in the trace, with {cond}, got ", cond.lhs)
            self.cx.assume(Basis.LAYOUT, Guard(cond, message, self.cx.b.loc))

    def _settle_strides(self, node: Node) -> None:
        """Guards that a node has the strides that it has in the trace."""
        while node not in self.links and node in self.parent:
            node = self.parent[node]
        if node in self.links:
            self._settle(node)
        elif node in self.walk.inputs:
            self.walk.laid_out.add(node)

    def _set(self, node: Node, value: Any) -> None:
        self.env[node] = value
        self.made[node] = self.writes[self.root(node)]

    def _again(self, node: Node) -> Any:
        if _gives_operand(node.target):
            return self.walk.read(self.parent[node])
        return self.walk.translate(node)

    def _put_piece(self, split: Node, which: int, new: Any) -> Value:
        base: Any = self.env[self.parent[split]]
        if isinstance(base, Complex) or isinstance(new, Complex):
            self.cx.unsupported("in-place change of a piece of complex numbers")
        args = self.walk.resolve(split.args[1:])
        before, self.cx.node = self.cx.node, split
        axis, windows = split_windows(self.cx, base, split.target, args)
        self.cx.node = before
        if split.target is aten.unbind.int:
            new = self._with_axis(base, new, axis)
        return put_window(self.cx, base, new, axis, windows[which])

    def _with_axis(self, base: Value, new: Value, axis: int) -> Value:
        shape = (*base.shape[:axis], as_expr(1), *base.shape[axis + 1 :])
        return self.cx.reshape(new, shape)

    def _undo(self, node: Node, base: Any, new: Any) -> Any:
        """`base` after its view `node` was replaced by `new`."""
        if isinstance(base, Complex) or isinstance(new, Complex):
            return self._undo_parts(node, base, new)
        cx, rank = self.cx, base.type.rank
        if _gives_operand(node.target):
            return new
        assert isinstance(node.target, torch._ops.OpOverload)
        if name_of(node.target) in _RESIZES and not cx.b.same(
            new.type.numel, base.type.numel
        ):
            cx.unsupported("in-place change of the first elements of a tensor")
        name, args = name_of(node.target), self.walk.resolve(node.args[1:])
        if name in _RESHAPES or name in _DROPOUTS or name in _RESIZES:
            return cx.reshape(cx.cast(new, base.dtype), base.shape)
        perm = _permutation(name, rank, args)
        if perm is not None:
            return cx.transpose(new, [perm.index(i) for i in range(rank)])
        if name == "slice":
            axis = cx.axis(args[0] if args else 0, rank)
            window = slice_window(cx, base.shape[axis], *args[1:])
            return put_window(cx, base, new, axis, window)
        if name == "select":
            axis = cx.axis(args[0], rank)
            window = select_window(cx, base.shape[axis], args[1])
            return put_window(cx, base, self._with_axis(base, new, axis), axis, window)
        if name == "narrow" and not isinstance(args[1], Value):
            axis = cx.axis(args[0], rank)
            begin = from_front(cx, args[1], base.shape[axis])
            window = (begin, cx.simplify(args[2]), 1)
            return put_window(cx, base, new, axis, window)
        return cx.unsupported(f"in-place change through a view made by {name}")

    def _undo_parts(self, node: Node, base: Any, new: Any) -> Complex:
        """The same for complex numbers, if the view moves both parts alike."""
        whole = isinstance(base, Complex) and isinstance(new, Complex)
        if not whole or str(node.target).startswith(("aten.adjoint", "aten._conj")):
            self.cx.unsupported("in-place change of a part of complex numbers")
        return Complex(
            self._undo(node, base.re, new.re), self._undo(node, base.im, new.im)
        )


def _permutation(name: str, rank: int, args: Sequence[Any]) -> list[int] | None:
    match name:
        case "permute":
            return [int(d) % rank for d in args[0]]
        case "transpose" | "swapaxes" | "swapdims":
            return swap_axes(rank, args[0], args[1])
        case "t" | "mT" | "adjoint":
            return swap_axes(rank, -1, -2) if rank > 1 else list(range(rank))
        case "numpy_T":
            return list(range(rank))[::-1]
        case "movedim" | "moveaxis":
            return moved_axes(rank, args[0], args[1])
        case _:
            return None
