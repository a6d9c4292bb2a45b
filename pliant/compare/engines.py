"""The engines that run a model: ours, and its peers.

An engine is prepared once per model and then bound to the inputs of one shape, which
gives a call without arguments. Each is fed and read in the way that costs it least: no
engine copies inputs or results that it need not copy, and none keeps results between
calls for the next to overwrite.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

import pliant
from pliant.cases import Case

Inputs = tuple[torch.Tensor, ...]
RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
Call = Callable[[], Any]


class NotAvailable(Exception):
    """The engine is not installed here; says what is missing."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is prepared from; `folder` keeps the ONNX file between runs."""

    case: Case
    threads: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Engine:
    """A model that is ready to run."""

    bind: Callable[[Inputs], Call]
    tensors: Callable[[Any], list[torch.Tensor]]  # of a result of the call
    model: pliant.CompiledModel | None = None  # if it is ours


def _leaves(result: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise NotAvailable(str(error)) from error


# ---- on torch tensors


def _pliant(setup: Setup) -> Engine:
    model = setup.case.compile(threads=setup.threads)
    return Engine(lambda inputs: lambda: model(*inputs), _leaves, model)


def _inference(model: Any) -> Callable[[Inputs], Call]:
    def bind(inputs: Inputs) -> Call:
        def call() -> Any:
            with torch.inference_mode():
                return model(*inputs)

        return call

    return bind


def _eager(setup: Setup) -> Engine:
    return Engine(_inference(setup.case.model), _leaves)


def _compiled(setup: Setup) -> Engine:
    compiled = torch.compile(setup.case.model, dynamic=True)
    bind = _inference(compiled)
    bind(setup.case.at(setup.case.example))()  # compiles now
    return Engine(bind, _leaves)


# ---- through an ONNX file


def onnx_path(setup: Setup) -> str:
    return str(setup.folder / "model.onnx")


def export_onnx(setup: Setup) -> float:
    """Makes the model's ONNX file, once per folder; gives the seconds it took."""
    for package in ("onnx", "onnxscript"):
        _import(package)
    stored = setup.folder / "export_seconds"
    if not stored.exists():
        started = perf_counter()
        try:
            _export_onnx(setup, setup.case.program)
        except torch.onnx.errors.OnnxExporterError:
            started = perf_counter()
            _export_onnx(setup, _views_of_copies(setup.case.export()))
        stored.write_text(repr(perf_counter() - started))
    return float(stored.read_text())


def _export_onnx(setup: Setup, program: torch.export.ExportedProgram | None) -> None:
    case = setup.case
    torch.onnx.export(
        case.model if program is None else program,
        case.at(case.example) if program is None else (),
        onnx_path(setup),
        dynamo=True,
        dynamic_shapes=case.dynamic_shapes if program is None else None,
        external_data=True,
        verbose=False,
    )


def _views_of_copies(
    program: torch.export.ExportedProgram,
) -> torch.export.ExportedProgram:
    """Makes tensors contiguous before they are viewed.

    torch's decompositions give attention's result other strides than the export did,
    and then fail to view it ("Cannot view a tensor with shape ..": T5). The ONNX file
    does not have these copies: a clone is dropped there.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target not in RESHAPES:
            continue
        source, shape = node.args
        with graph.inserting_before(node):
            copy = graph.call_function(
                torch.ops.aten.clone.default,
                (source,),
                {"memory_format": torch.contiguous_format},
            )
        copy.meta = dict(source.meta)
        node.args = (copy, shape)
    return program


def _by_position(names: Sequence[str], inputs: Inputs) -> dict[str, Any]:
    if len(names) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs became {len(names)} in the ONNX file")
    arrays = [x.contiguous().numpy() for x in inputs]
    return dict(zip(names, arrays, strict=True))


def _onnx_runtime(setup: Setup) -> Engine:
    runtime = _import("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = setup.threads
    options.inter_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    session = runtime.InferenceSession(
        onnx_path(setup), options, providers=["CPUExecutionProvider"]
    )
    names = [item.name for item in session.get_inputs()]
    results = [item.name for item in session.get_outputs()]

    def bind(inputs: Inputs) -> Call:
        binding = session.io_binding()
        arrays = _by_position(names, inputs)
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)

        def call() -> Any:
            binding.clear_binding_outputs()  # or it would write over the last results
            for name in results:
                binding.bind_output(name)
            session.run_with_iobinding(binding)
            return binding.get_outputs(), arrays

        return call

    def tensors(result: Any) -> list[torch.Tensor]:
        return [torch.from_numpy(value.numpy()) for value in result[0]]

    return Engine(bind, tensors)


def _openvino(setup: Setup) -> Engine:
    openvino = _import("openvino")
    settings = {
        "INFERENCE_NUM_THREADS": setup.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # never bf16 unasked
        "NUM_STREAMS": 1,
    }
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(onnx_path(setup)), "CPU", settings)
    request = compiled.create_infer_request()
    names = [port.any_name for port in compiled.inputs]

    def bind(inputs: Inputs) -> Call:
        arrays = _by_position(names, inputs)
        # Shared, the results would be memory that the next call writes to.
        return lambda: request.infer(arrays, share_inputs=True, share_outputs=False)

    def tensors(result: Any) -> list[torch.Tensor]:
        return [torch.from_numpy(result[port]) for port in compiled.outputs]

    return Engine(bind, tensors)


# ---- TVM


def _tvm(setup: Setup) -> Engine:
    tvm = _import("tvm")
    relax = _import("tvm.relax")
    frontend = _import("tvm.relax.frontend.torch")
    case = setup.case
    module = frontend.from_exported_program(case.export())
    cpu = tvm.target.codegen.llvm_get_system_cpu()
    target = tvm.target.Target(
        {"kind": "llvm", "mcpu": cpu, "num-cores": setup.threads}
    )
    executable = tvm.compile(module, target=target)
    run = relax.VirtualMachine(executable, tvm.cpu())["main"]

    def bind(inputs: Inputs) -> Call:
        arrays = [tvm.runtime.from_dlpack(x.contiguous()) for x in inputs]
        return lambda: run(*arrays)

    def tensors(result: Any) -> list[torch.Tensor]:
        many = result if not hasattr(result, "shape") else [result]
        return [torch.utils.dlpack.from_dlpack(value) for value in many]

    return Engine(bind, tensors)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine by its name on the command line and in tables."""

    title: str
    prepare: Callable[[Setup], Engine]
    from_onnx: bool = False  # is prepared from the ONNX file
    compiles_per_shape: bool = False  # may; takes long, so not part of a quick run


OURS = "pliant"
ENGINES: dict[str, EngineKind] = {
    OURS: EngineKind("pliant", _pliant),
    "eager": EngineKind("torch eager", _eager),
    "compile": EngineKind("torch.compile", _compiled, compiles_per_shape=True),
    "onnxruntime": EngineKind("ONNX Runtime", _onnx_runtime, from_onnx=True),
    "openvino": EngineKind("OpenVINO", _openvino, from_onnx=True),
    "tvm": EngineKind("TVM", _tvm, compiles_per_shape=True),
}
PEERS = tuple(name for name in ENGINES if name != OURS)
