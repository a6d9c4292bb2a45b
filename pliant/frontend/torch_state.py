"""Tensors of a module that a program changes: constants become parameters of `main`.

    %cache = constant() {name = "cache"}        main(%x, %cache)
    ...                                    ->   ...
    return %y, %new                             return %y, %new    new is cache's value

The names of the buffers that a program writes are in `Signature.changed`; their new
values are its last results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pliant.frontend.contract import Imported
from pliant.frontend.signature import Held, TensorSlot
from pliant.frontend.torch_tensors import as_real, dtype_of
from pliant.ir.graph import Constant, Module, Names, Op, Value, names_of, substitute
from pliant.ir.types import TensorType
from pliant.sym import as_expr


def promoted(
    module: Module, wanted: Callable[[Constant], str | None], reserved: Sequence[str]
) -> tuple[Module, dict[str, Value]]:
    """The module with some constants as the last params of `main`, by their keys.

    `wanted` gives a constant's key, or None if it stays one.
    """
    main = module.main
    params: dict[str, Value] = {}
    names, mapping = Names([*names_of(main), *reserved]), dict[Value, Value]()
    ops: list[Op] = []
    for op in main.ops:
        key = None
        if op.name == "constant":
            key = wanted(module.constants[op.str_attr("name")])
        if key is None:
            ops.append(substitute(op, mapping))
            continue
        if key not in params:
            name = names.fresh(key.removeprefix("model."))
            params[key] = Value(name, op.result.type)
        mapping[op.result] = params[key]
    results = tuple(mapping.get(v, v) for v in main.results)
    graph = main.replace(
        params=(*main.params, *params.values()), ops=tuple(ops), results=results
    )
    return module.with_main(graph), params


def memory_of(name: str, tensor: Any) -> tuple[object, ...]:
    """What tells a tensor's memory from others'; one without any has a name."""
    where = tensor.data_ptr() if tensor.numel() else name
    return where, tuple(tensor.shape)


@contextmanager
def cumulative(model: Any) -> Iterator[None]:
    """A momentum of None would make a trace read a count: it is NaN meanwhile."""
    norms = [
        m
        for m in model.modules()
        if getattr(m, "momentum", 0) is None and hasattr(m, "num_batches_tracked")
    ]
    for norm in norms:
        norm.momentum = math.nan
    try:
        yield
    finally:
        for norm in norms:
            norm.momentum = None


def with_buffers(
    programs: Sequence[Imported], tensors: Mapping[str, Any]
) -> tuple[Imported, ...]:
    """The programs of one model; the buffers that any of them writes are params of all.

    `tensors` are the model's, by their names.
    """
    changed = dict.fromkeys(n for p in programs for n in p.signature.changed)
    if not changed:
        return tuple(programs)
    names = {memory_of(name, tensors[name]): name for name in changed}
    types = {name: _type_of(tensors[name]) for name in changed}

    def wanted(constant: Constant) -> str | None:
        kept: Any = constant.keep
        return None if kept is None else names.get(memory_of(constant.name, kept))

    return tuple(_with_buffers(p, wanted, types) for p in programs)


def _type_of(tensor: Any) -> TensorType:
    real = as_real(tensor)
    dtype = dtype_of(real.dtype)
    assert dtype is not None
    return TensorType(dtype, tuple(map(as_expr, real.shape)))


def _with_buffers(
    program: Imported,
    wanted: Callable[[Constant], str | None],
    types: Mapping[str, TensorType],
) -> Imported:
    module, params = promoted(program.module, wanted, ())
    main, signature = module.main, program.signature
    names = Names(names_of(main))
    for name, kind in types.items():  # some are written, and never read
        if name not in params:
            params[name] = Value(names.fresh(name), kind)
    held = {name: params[name] for name in types}
    own = [v for v in main.params if v not in params.values()]
    # A seed is drawn behind all else.
    seeds = [v for v in own if v.name == signature.seed]
    own = [v for v in own if v.name != signature.seed]
    main = main.replace(params=(*own, *held.values(), *seeds))
    first = len(main.results) - len(signature.changed)
    stores = tuple(
        (params[name].name, number)
        for number, name in enumerate(signature.changed, first)
    )
    return replace(
        program,
        module=module.with_main(main),
        signature=replace(
            signature,
            held=tuple(Held(n, TensorSlot(v.name, v.type)) for n, v in held.items()),
            stores=(*signature.stores, *stores),
        ),
    )
