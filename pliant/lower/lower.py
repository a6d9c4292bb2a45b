"""Fusions become calls of loop functions, values become buffers.

    %y = fusion(%x, %w) {kind = "matmul"} region ...
    ->
    %y = alloc f32[batch, seq, 768]
    %work = alloc f32[threads, 112, 32]
    call_loop(%x, %w.packed, %y, %work) {callee = "matmul_0", sizes = [batch, seq],
                                         computes = "matmul_0"}
    graph @matmul_0(..) { .. }     the fusion's region

The result is in destination-passing style: `alloc`, `view`, `call_loop` and the
constants, in order of execution. What a fusion computes stays attached to the call that
completes it, as a graph function of the module. Identical loop functions are kept once.
Weights that a kernel reads in another layout are repacked here, and kept in that layout
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pliant.context import Context
from pliant.errors import InternalError
from pliant.ir.callees import callees, reached
from pliant.ir.graph import (
    Attr,
    Constant,
    DataCheck,
    Graph,
    KernelPlan,
    Library,
    Module,
    Names,
    Op,
    Value,
    names_of,
)
from pliant.ir.loop_walk import calling
from pliant.ir.loops import LoopFunc
from pliant.ir.ops import CALLS, LIBRARY, SCANS
from pliant.ir.packed import Packed, PackedWeight, Within
from pliant.ir.spec import destinations
from pliant.ir.types import TensorType
from pliant.ir.views import View, resolve
from pliant.kernels.strips import with_general_strips
from pliant.kernels.tiles import gemm_tile
from pliant.lower.alike import MadeKernel, fusion_form
from pliant.lower.attend import lower_attention
from pliant.lower.attend_backward import lower_attention_backward
from pliant.lower.coded import lower_coded
from pliant.lower.contract import lower_matmul, whole_weight
from pliant.lower.convolve import lower_conv, lower_conv_transpose
from pliant.lower.convolve_last import lower_conv_last
from pliant.lower.grouped import lower_grouped
from pliant.lower.library import lower_library
from pliant.lower.rows import THREADS
from pliant.lower.scan import lower_scan
from pliant.lower.step import (
    Argument,
    Fusion,
    KernelStep,
    LibraryStep,
    Retyped,
    Scratch,
    Temporary,
)
from pliant.lower.to_loops import Lowering, lower_group
from pliant.machine import pages
from pliant.sym import Expr, Facts, as_expr, sym


@dataclass(slots=True)
class _Lowering:
    module: Module
    cx: Context
    facts: Facts
    producers: dict[Value, Op]  # of the fused graph
    graph: Graph
    names: Names
    checks: list[DataCheck]  # the condition of each run-time check
    numbered: int = 0  # how often a kernel has asked for the number of a check
    ops: list[Op] = field(default_factory=list)
    # Memo of resolved views.
    views: dict[Value, View | None] = field(default_factory=dict)
    values: dict[Value, Value] = field(default_factory=dict)  # fused -> lowered
    loops: dict[str, LoopFunc] = field(default_factory=dict)
    known: dict[tuple[object, ...], str] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    constant_values: dict[str, Value] = field(default_factory=dict)
    purposes: dict[str, Graph] = field(default_factory=dict)  # what each call computes
    plans: dict[str, tuple[KernelPlan, ...]] = field(default_factory=dict)
    libraries: dict[str, Library] = field(default_factory=dict)
    # Indices of main that a kernel checks to be below a size: if one is not, no other
    # kernel runs. (In a loop or branch, the next one would.)
    below: dict[Value, Expr] = field(default_factory=dict)
    # Kernels of fusions that several versions of `main` have.
    fusions: dict[
        tuple[Op, tuple[View, ...]], tuple[str, Sequence[KernelStep | LibraryStep]]
    ] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # fusions of each kind

    def of_version(self, graph: Graph) -> _Lowering:
        """For another version of `main`; what was made so far is shared."""
        return replace(
            self,
            producers=graph.producers(),
            graph=graph,
            names=Names(names_of(graph)),
            ops=[],
            views={},
            values={},
            constant_values={},
        )

    def number_check(self, check: DataCheck) -> int:
        self.numbered += 1
        if check not in self.checks:
            self.checks.append(check)
        return self.checks.index(check) + 1

    def resolve(self, value: Value) -> View | None:
        if value not in self.views:
            self.views[value] = resolve(value, self.producers, self.facts)
        return self.views[value]

    def kernels(self) -> Lowering:
        lanes, variants = self.cx.target.lanes, self.cx.options.variants
        return Lowering(self.facts, self.number_check, lanes, variants)

    # ---- buffers

    def alloc(self, kind: TensorType, hint: str) -> Value:
        value = Value(self.names.fresh(hint), kind)
        attrs = (("bytes", kind.bytes), ("shape", kind.shape), ("dtype", kind.dtype))
        self.ops.append(Op("alloc", (), attrs, (value,)))
        return value

    def constant(self, constant: Constant) -> Value:
        if constant.name not in self.constant_values:
            self.constants[constant.name] = constant
            value = Value(self.names.fresh(constant.name), constant.type)
            self.constant_values[constant.name] = value
            op = Op("constant", (), (("name", constant.name),), (value,))
            self.ops.append(op)
        return self.constant_values[constant.name]

    def base(self, value: Value) -> Value:
        """The buffer of a value that some op of the fused graph defines."""
        if value not in self.values:
            producer = self.producers.get(value)
            assert producer is not None and producer.name == "constant", value
            name = producer.str_attr("name")
            self.values[value] = self.constant(self.module.constants[name])
        return self.values[value]

    def view(self, view: View) -> Value:
        base = self.base(view.base)
        if view.is_contiguous() and view.shape == view.base.shape:
            return base
        kind = TensorType(base.dtype, view.shape, view.strides)
        value = Value(self.names.fresh(f"{base.name}_view"), kind)
        offset = view.offset * base.dtype.bytes
        self.ops.append(Op("view", (base,), (("offset", offset),), (value,)))
        return value

    # ---- calls

    def share(self, func: LoopFunc) -> str:
        """The name of an identical function that is known already, or of this one."""
        key = (func.sizes, func.buffers, func.body)
        found = self.known.get(key) if self.cx.options.share else None
        if found is not None:
            return found
        name = func.name
        while name in self.loops:
            name += "_"
        self.known[key] = name
        self.loops[name] = LoopFunc(name, func.sizes, func.buffers, func.body)
        return name

    def call(
        self,
        step: KernelStep | LibraryStep,
        arguments: Sequence[Value],
        purpose: Graph | None,
        loc: str,
    ) -> None:
        """Appends a call; `purpose` is what it computes, if it completes something."""
        given = tuple(arguments)
        ends: tuple[tuple[str, Attr], ...] = ()
        if purpose is not None:
            purpose = self.purposes.setdefault(purpose.name, purpose)
            ends = (("computes", purpose.name),)
        attrs: tuple[tuple[str, Attr], ...]
        if isinstance(step, LibraryStep):
            if step.library is not None:
                self.libraries[step.callee] = step.library
            attrs = (("callee", step.callee), ("sizes", step.sizes), *ends)
            self.ops.append(Op("call_library", given, attrs, (), (), loc))
            return
        for helper in _needed(step):
            if helper.name not in self.loops:
                self.loops[helper.name] = helper
        func = step.func
        if step.planned is not None:
            inner = self.share(step.planned)
            func = calling(func, {step.planned.name: inner})
        name = self.share(func)
        if step.product is not None:
            self.plans[name] = (step.product,)
        sizes = step.sizes or tuple(sym(s) for s in step.func.sizes)
        attrs = (("callee", name), ("sizes", sizes), *ends)
        self.ops.append(Op("call_loop", given, attrs, (), (), loc))


def _needed(step: KernelStep) -> Iterator[LoopFunc]:
    """The helpers that a kernel calls, of those that kernels of its kind may call."""
    given = {helper.name: helper for helper in step.helpers}
    names = [*callees(step.func)]
    if step.planned is not None:
        names += callees(step.planned)
    called = reached(names, given)
    return (helper for helper in step.helpers if helper.name in called)


def lower(module: Module, cx: Context) -> Module:
    """Lowers every fusion of `main`."""
    graph = module.main
    state = _begun(module, cx)
    hold_packed(module, cx)
    lowered = {}
    with pages.copying():  # weights, into the layouts of their kernels
        for version in (graph, *module.versions):
            own = state if version is graph else state.of_version(version)
            # A region of control flow has its own name, but is the `main` here.
            key = "main" if version is graph else version.name
            lowered[key] = _lowered(own)
    return Module(
        {**lowered, **state.purposes},
        with_general_strips(state.loops),
        {**module.libraries, **state.libraries},
        state.constants,
        tuple(state.checks),
        plans=state.plans,
        inside=module.inside,
        knobs=module.knobs,
        chunks=module.chunks,
    )


def _begun(module: Module, cx: Context) -> _Lowering:
    graph = module.main
    names, checks = Names(names_of(graph)), list(module.checks)
    facts, producers = cx.facts(graph), graph.producers()
    return _Lowering(module, cx, facts, producers, graph, names, checks)


def hold_packed(module: Module, cx: Context) -> None:
    """Finds the weights that a product of `main` packs as a whole.

    Other kernels of `main`, and of the regions that are lowered before it, read the
    panels too. So a tied weight (an embedding that is also the output layer) is stored
    once.
    """
    if cx.options.packing:
        for name, whole in _packed_weights(_begun(module, cx)).items():
            cx.packed.whole.setdefault(name, whole)


def _lowered(state: _Lowering) -> Graph:
    """One version of `main`."""
    graph = state.graph
    for param in graph.params:
        state.values[param] = param
    prefix = _prefix(graph)
    for op in graph.ops:
        if op.name == "fusion":
            _lower_fusion(state, op, prefix)
    results = _results(state, graph)
    return Graph(
        graph.name,
        graph.params,
        tuple(state.ops),
        results,
        graph.sizes,
        graph.constraints,
    )


def _prefix(graph: Graph) -> str:
    """Kernels of a region (memory/flow.py) are named after it."""
    return "" if graph.name.startswith("main") else f"{graph.name}."


def _packed_weights(state: _Lowering) -> dict[str, PackedWeight]:
    """The weights that products pack as a whole, by name."""
    found: dict[str, PackedWeight] = {}
    for op in state.graph.ops:
        if op.name != "fusion" or op.str_attr("kind") != "matmul":
            continue
        (root,) = (o for o in op.regions[0].ops if o.name == "matmul")
        b = root.operands[1]
        if b.dtype is not root.result.dtype:
            continue
        if any(d != as_expr(1) for d in b.shape[:-2]):
            continue
        given = dict(zip(op.regions[0].params, op.operands, strict=True))
        view = state.resolve(given[b])
        source = None if view is None else state.producers.get(view.base)
        if view is None or source is None or source.name != "constant":
            continue
        constant = state.module.constants[source.str_attr("name")]
        tile = gemm_tile(root.result.dtype, state.cx.target)
        whole = whole_weight(constant, view, tile)
        if whole is not None:
            found.setdefault(constant.name, whole)
    return found


def _lower_fusion(state: _Lowering, op: Op, prefix: str) -> None:
    region = op.regions[0]
    views: dict[Value, View] = {}
    for param, operand in zip(region.params, op.operands, strict=True):
        view = state.resolve(operand)
        if view is None:
            raise InternalError("lower", f"{operand} is not a strided view")
        views[param] = view
    # Versions have ops in common; what such an op reads may lie elsewhere in each.
    key = op, tuple(views.values())
    if key not in state.fusions:
        kind = op.str_attr("kind")
        state.counts[kind] = state.counts.get(kind, -1) + 1
        name = f"{prefix}{kind}_{state.counts[kind]}"
        state.fusions[key] = name, _kernels(state, op, views, name)
    name, steps = state.fusions[key]
    results = dict.fromkeys(region.results)
    buffers: dict[Value | Temporary, Value] = {}
    for inner, outer in zip(region.results, op.results, strict=True):
        if inner in results and inner not in buffers:
            buffers[inner] = state.alloc(outer.type, outer.name)
        state.values[outer] = buffers[inner]
        made = region.producers().get(inner)
        if state.graph.name == "main" and made is not None and made.name == "in_range":
            state.below[outer] = made.dim_attr("size")
    for step in steps:
        arguments = [
            _argument(state, argument, views, buffers, name)
            for argument in step.arguments
        ]
        completes = step is steps[-1]
        purpose = region.replace(name=name) if completes else None
        state.call(step, arguments, purpose, op.loc)


def _kernels(
    state: _Lowering, op: Op, views: dict[Value, View], name: str
) -> Sequence[KernelStep | LibraryStep]:
    constants: dict[Value, Constant] = {}
    for param, view in views.items():
        source = state.producers.get(view.base)
        if source is not None and source.name == "constant":
            constants[param] = state.module.constants[source.str_attr("name")]
    fusion = Fusion(
        op.regions[0],
        name,
        views,
        constants,
        state.facts,
        state.cx.target,
        state.cx.options,
        state.number_check,
    )
    kind = op.str_attr("kind")
    if kind in CALLS or kind in LIBRARY or not state.cx.options.share:
        return _steps(state, kind, fusion)
    return _kernels_by_form(state, kind, fusion)


def _kernels_by_form(
    state: _Lowering, kind: str, fusion: Fusion
) -> Sequence[KernelStep | LibraryStep]:
    """The kernels of an earlier fusion that is like this one, or new ones."""
    params = {param: k for k, param in enumerate(fusion.region.params)}
    held = tuple(
        (params[param], weight.packed.key, weight.axis, weight.width)
        for param, weight in _held(state, fusion).items()
    )
    below = tuple((params[p], size) for p, size in _below(state, fusion).items())
    key = kind, fusion_form(fusion), held, below
    made = state.cx.kernels.get(key)
    if isinstance(made, MadeKernel):
        return made.steps_of(fusion)
    # A region that is lowered a second time has the names of the first, which are kept.
    fusion = replace(fusion, name=state.cx.kernel_names.fresh(fusion.name))
    numbered = state.numbered
    steps = _steps(state, kind, fusion)
    # The number of a check tells its place in the source, so it is this fusion's own.
    known = [step for step in steps if isinstance(step, KernelStep)]
    if state.numbered == numbered and len(known) == len(steps):
        state.cx.kernels[key] = MadeKernel(fusion, known)
    return steps


def _held(state: _Lowering, fusion: Fusion) -> dict[Value, PackedWeight]:
    """The weights that are stored only as the panels of a product."""
    whole = state.cx.packed.whole
    return {
        param: whole[constant.name]
        for param, constant in fusion.constants.items()
        if constant.name in whole and fusion.views[param].base.shape == param.shape
    }


def _below(state: _Lowering, fusion: Fusion) -> dict[Value, Expr]:
    """The indices that another kernel has checked to be below a size."""
    found = ((p, state.below.get(v.base)) for p, v in fusion.views.items())
    return {param: size for param, size in found if size is not None}


# Fusions of one contraction with what is computed around it, by their kind.
_CONTRACTIONS: dict[str, Callable[[Fusion], list[KernelStep]]] = {
    "matmul": lower_matmul,
    "coded_matmul": lower_coded,
    "grouped_matmul": lower_grouped,
    "conv": lower_conv,
    "conv_last": lower_conv_last,
    "conv_transpose": lower_conv_transpose,
    "attention": lower_attention,
    "attention_lse": lower_attention,
    "attention_backward": lower_attention_backward,
}


def _steps(
    state: _Lowering, kind: str, fusion: Fusion
) -> Sequence[KernelStep | LibraryStep]:
    region, name = fusion.region, fusion.name
    if kind in ("map", "row"):
        lowering = replace(state.kernels(), below=_below(state, fusion))
        return [lower_group(region, name, lowering, _held(state, fusion))]
    if kind in _CONTRACTIONS:
        if kind.endswith("matmul") and not state.cx.options.packing:
            fusion = replace(fusion, constants={})
        return _CONTRACTIONS[kind](fusion)
    if kind in CALLS:
        return [_call_step(state, region)]
    if kind in LIBRARY:
        return [lower_library(region, state.number_check)]
    if kind in SCANS:
        return [lower_scan(region, name, state.facts, state.number_check)]
    raise InternalError("lower", f"no kernel for fusions of kind {kind}")


def _call_step(state: _Lowering, region: Graph) -> KernelStep | LibraryStep:
    """A call that was in the graph already: its results become destinations."""
    (op,) = region.ops
    if op.name == "call_library":
        arguments = (*op.operands, *op.results)
        return LibraryStep(op.str_attr("callee"), arguments, op.dims_attr("sizes"))
    func = state.module.loops[op.str_attr("callee")]
    given: list[Argument] = []
    for buf, value in zip(func.buffers, destinations(func, op), strict=True):
        if value is None:
            shape = tuple(d.substitute(_sizes_of(func, op)) for d in buf.shape[1:])
            given.append(Scratch(TensorType(buf.dtype, shape)))
        else:
            given.append(value)
    others = tuple(reached(callees(func), state.module.loops).values())
    return KernelStep(func, tuple(given), others, op.dims_attr("sizes"))


def _sizes_of(func: LoopFunc, op: Op) -> dict[str, Expr]:
    return dict(zip(func.sizes, op.dims_attr("sizes"), strict=True))


def _argument(
    state: _Lowering,
    argument: Argument,
    views: dict[Value, View],
    buffers: dict[Value | Temporary, Value],
    name: str,
) -> Value:
    match argument:
        case Scratch(kind):
            shape = (sym(THREADS), *kind.shape)
            return state.alloc(TensorType(kind.dtype, shape), f"{name}_work")
        case Temporary():
            if argument not in buffers:
                buffers[argument] = state.alloc(argument.type, f"{name}_temporary")
            return buffers[argument]
        case Packed(within=Within(whole, offset, shape)):
            base = _argument(state, whole, views, buffers, name)
            kind = TensorType(argument.dtype, tuple(map(as_expr, shape)))
            value = Value(state.names.fresh(f"{base.name}_part"), kind)
            attrs = (("offset", as_expr(offset * kind.dtype.bytes)),)
            state.ops.append(Op("view", (base,), attrs, (value,)))
            return value
        case Packed():
            taken = state.module.constants
            return state.constant(state.cx.packed.constant(argument, taken))
        case Retyped(source, kind):
            base = _argument(state, source, views, buffers, name)
            value = Value(state.names.fresh(f"{base.name}_view"), kind)
            state.ops.append(Op("view", (base,), (("offset", as_expr(0)),), (value,)))
            return value
        case View():
            return state.view(argument)
        case Value():
            if argument in views:
                return state.view(views[argument])
            # A result that a kernel writes and nothing reads.
            if argument not in buffers:
                buffers[argument] = state.alloc(argument.type, argument.name)
            return buffers[argument]
    raise InternalError("lower", f"unknown argument {argument}")


def _results(state: _Lowering, graph: Graph) -> tuple[Value, ...]:
    """Gives every result a buffer of its own, by a copy where necessary."""
    out: list[Value] = []
    taken: set[Value] = set()
    allocated = {op.result for op in state.ops if op.name == "alloc"}
    for result in graph.results:
        view = state.resolve(result)
        if view is not None and view.is_contiguous():
            base = state.base(view.base)
            if base in allocated and base not in taken:
                taken.add(base)
                out.append(base if view.shape == base.shape else state.view(view))
                continue
        out.append(_copy(state, result, view))
    return tuple(out)


def _copy(state: _Lowering, result: Value, view: View | None) -> Value:
    if view is None or not view.is_contiguous():
        raise InternalError("lower", f"result {result} is not in memory")
    source = Value("source", TensorType(result.dtype, view.base.shape))
    copied = Value("copied", result.type)
    op = Op("reshape", (source,), (("shape", result.shape),), (copied,))
    target = state.alloc(result.type, f"{result.name}_copy")
    region = Graph(target.name, (source,), (op,), (copied,))
    name = f"{_prefix(state.graph)}copy"
    step = lower_group(region, name, state.kernels())
    buffers = {source: state.base(view.base), copied: target}
    arguments = [buffers[a] for a in step.arguments if isinstance(a, Value)]
    state.call(step, arguments, region, "")
    return target
