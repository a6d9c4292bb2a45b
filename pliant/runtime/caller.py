"""The base class of a callable model, and how a call reads torch's tensors.

C code (`python.c`) serves a call from the tensors' memory to the results: no Python
code runs if every argument is a plain torch tensor or an int. This file looks up the C
functions of torch that this needs, by symbol name, and tests them. If one is missing or
gives an unexpected result, calls go through tvm-ffi, and the checks run in Python.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import c_bool, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pliant.runtime.description import Framework
from pliant.runtime.places import IMPL_BYTES, find_places, find_tag, only, word, words

if TYPE_CHECKING:
    from pliant.runtime._plt import Caller, ResultMemory, Watch
else:
    try:
        from pliant.runtime._plt import Caller, ResultMemory, Watch
    except ImportError:  # binding.load tells what is wrong, once it is asked

        class Caller:
            pass

        class ResultMemory:
            pass

        class Watch:
            pass


__all__ = [
    "Caller",
    "ResultMemory",
    "Watch",
    "framework_of_torch",
    "is_plain",
    "watching_torch",
]

# In libtorch_cpu.so: torch's C interface for models that are compiled ahead.
_MAKING = {
    "empty": "aoti_torch_empty_strided",
    "release": "aoti_torch_delete_tensor_object",
}
# In libtorch_python.so: PyObject *THPVariable_Wrap(at::TensorBase &&).
_WRAP = "_Z16THPVariable_WrapON2at10TensorBaseE"
# What a call asks of a tensor. In libtorch_cpu.so:
_OF_TENSORS = {
    "storage_bytes": "aoti_torch_get_storage_size",
    "storage_offset": "aoti_torch_get_storage_offset",
    "data": "aoti_torch_get_data_ptr",
}
# In libc10.so: TensorImpl::requires_grad, TensorImpl::_fw_grad, GradMode::is_enabled.
_OF_GRADIENTS = {
    "needs_gradient": "_ZNK3c1010TensorImpl13requires_gradEv",
    "tangent": "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE",
    "grad_mode": "_ZN3c108GradMode10is_enabledEv",
}
_DLPACK_MAJOR = 1


def framework_of_torch() -> int:
    """The address of a `Framework` for torch, or 0 while torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "export"):  # not yet imported to its end
        return 0
    found = _framework(torch)
    return 0 if found is None else ctypes.addressof(found)


def watching_torch() -> int:
    """The same, or 0 if a `Watch` cannot read torch's tensors."""
    found = framework_of_torch()
    return found if found and Framework.from_address(found).layout_words else 0


@functools.cache
def _framework(torch: Any) -> Framework | None:
    exchange = _exchange_table(torch.Tensor)
    if not exchange:
        return None
    table = Framework(
        type=id(torch.Tensor), exchange=exchange, parameter=id(torch.nn.Parameter)
    )
    folder = Path(str(torch.__file__)).parent / "lib"
    try:
        cpu = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        core = ctypes.CDLL(str(folder / "libc10.so"))
        for library, symbols in ((cpu, _OF_TENSORS), (core, _OF_GRADIENTS)):
            for name, symbol in symbols.items():
                setattr(table, name, _address(library, symbol))
        modes = torch.utils._python_dispatch._disable_current_modes
        with modes(), torch.inference_mode(False), torch.no_grad():
            if not _Trial(torch, table).passes():
                return None
            find_places(torch, table)
            table.tag_place = find_tag()
    except (OSError, AttributeError, RuntimeError):
        return None
    try:
        found = {name: _address(cpu, symbol) for name, symbol in _MAKING.items()}
        wrapping = ctypes.CDLL(str(folder / "libtorch_python.so"))
        found["wrap"] = _address(wrapping, _WRAP)
    except (OSError, AttributeError):
        return table
    for name, address in found.items():
        setattr(table, name, address)
    return table


class _Trial:
    """Finds the offsets of torch's fields, and compares its C functions with Python.

    A tensor's Python object holds the address of torch's C++ object, which holds the
    dispatch keys. An offset is accepted if it is the only one at which several tensors
    have the value that Python reports.
    """

    def __init__(self, torch: Any, table: Framework) -> None:
        self.torch, self.table = torch, table
        plain = self._ones()
        with torch.inference_mode():
            inference = self._ones()
        self.samples = [
            plain,
            inference,
            plain[2:4],
            torch._neg_view(plain),
            self._ones(torch.complex64).conj(),
            torch.nn.Parameter(self._ones()),
            self._ones(torch.bool),
            plain[:0],
        ]
        table.plain = _keys(torch, plain) | _keys(torch, inference)

    def _ones(self, dtype: Any = None) -> Any:
        torch = self.torch
        return torch.ones(6, dtype=dtype or torch.float32, device="cpu")

    def passes(self) -> bool:
        table, torch = self.table, self.torch
        size = torch.Tensor.__basicsize__
        inside = [words(id(t), size, t._cdata) for t in self.samples]
        offset = only(inside)
        if offset is None:
            return False
        table.tensor_offset = offset
        keys = [words(t._cdata, IMPL_BYTES, _keys(torch, t)) for t in self.samples]
        place = only(keys)
        if place is None:
            return False
        table.keys_offset = place
        return all(map(self._agrees, self.samples)) and self._knows_gradients()

    def _agrees(self, t: Any) -> bool:
        table, at = self.table, id(t) + self.table.tensor_offset
        size, offset, data = c_int64(-1), c_int64(-1), c_void_p()
        for address, room in (
            (table.storage_bytes, size),
            (table.storage_offset, offset),
            (table.data, data),
        ):
            read = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p)(address)
            if read(at, ctypes.addressof(room)) != 0:
                return False
        found = (size.value, offset.value, data.value or 0)
        storage = t.untyped_storage()
        return found == (storage.nbytes(), t.storage_offset(), t.data_ptr())

    def _knows_gradients(self) -> bool:
        """Tests the C functions about gradients on tensors with known answers."""
        table, torch = self.table, self.torch
        needs = ctypes.CFUNCTYPE(c_bool, c_void_p)(table.needs_gradient)
        mode = ctypes.CFUNCTYPE(c_bool)(table.grad_mode)
        find = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_uint64, c_void_p)(table.tangent)

        def tangent(t: Any) -> int:
            found = find(t._cdata, 0, id(t) + table.tensor_offset)
            return word(cast(int, found))

        plain, leaf = self.samples[0], self._ones().requires_grad_()
        table.no_tangent = tangent(plain)
        answers = []
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                answers.append(mode() is enabled)
        with torch.enable_grad():
            inner = leaf * 2
        answers += [needs(leaf._cdata), needs(inner._cdata), not needs(plain._cdata)]
        answers += [tangent(t) == table.no_tangent for t in (leaf, inner)]
        level = torch._C._enter_dual_level()  # torch.autograd.forward_ad loads much
        try:
            dual = torch._make_dual(self._ones(), self._ones(), level)
            answers.append(tangent(dual) != table.no_tangent)
        finally:
            torch._C._exit_dual_level(level)
        return all(answers)


def _keys(torch: Any, tensor: Any) -> int:
    return cast(int, torch._C._dispatch_keys(tensor).raw_repr())


def _exchange_table(kind: type) -> int:
    """DLPack's table of C functions, if the class has one that we can read."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = cast(int, read(capsule, b"dlpack_exchange_api"))
    major = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint32))[0]
    reader = ctypes.cast(address, ctypes.POINTER(c_void_p))[_READER]
    return address if major == _DLPACK_MAJOR and reader else 0


# dltensor_from_py_object_no_sync, which may be missing: after the version (8 bytes), a
# pointer to an older table, and three other functions.
_READER = 5


def _address(library: ctypes.CDLL, symbol: str) -> int:
    return cast(int, ctypes.cast(getattr(library, symbol), c_void_p).value)


# ---- the same checks, in Python


def is_plain(value: Any) -> bool:
    """Whether a torch tensor is described completely by its bytes; True for others.

    The same check as is_plain of python.c, for tensors that are not read there.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return True
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    if value.layout is not torch.strided or value.device.type != "cpu":
        return False
    if value.is_neg() or value.is_conj() or has_tangent(value):
        return False
    needs = value.requires_grad and torch.is_grad_enabled()
    return not needs and storage_lacks(value) == 0


def has_tangent(value: Any) -> bool:
    """Whether a torch tensor carries a tangent of forward-mode differentiation."""
    torch: Any = sys.modules["torch"]
    inside = torch.autograd.forward_ad._current_level >= 0
    return inside and torch._unpack_dual(value, 0)[1] is not None


def storage_lacks(value: Any) -> int:
    """By how many bytes a torch tensor's sizes and strides exceed its storage."""
    if value.numel() == 0:
        return 0
    reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    end = value.storage_offset() + reach + 1
    return int(max(0, end * value.element_size() - value.untyped_storage().nbytes()))
