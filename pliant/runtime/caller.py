"""The class of what runs a model when it is called, and torch's side of such a call.

A call is served by C (`python.c`) from the tensors' memory to the results: no Python
code runs if every argument is a plain torch tensor or an int. What that needs of torch
is found here, by the names of symbols; a torch without them is served through its
DLPack exchange table, and one without that through tvm-ffi.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pliant.runtime.description import Framework

if TYPE_CHECKING:
    from pliant.runtime._plt import Caller
else:
    try:
        from pliant.runtime._plt import Caller
    except ImportError:  # binding.load tells what is wrong, once it is asked

        class Caller:
            pass


__all__ = ["Caller", "framework_of_torch"]

# In libtorch_cpu.so: torch's C interface for models that are compiled ahead.
_MAKING = {
    "empty": "aoti_torch_empty_strided",
    "data": "aoti_torch_get_data_ptr",
    "release": "aoti_torch_delete_tensor_object",
}
# In libtorch_python.so: PyObject *THPVariable_Wrap(at::TensorBase &&).
_WRAP = "_Z16THPVariable_WrapON2at10TensorBaseE"
_DLPACK_MAJOR = 1


def framework_of_torch() -> int:
    """The address of a `Framework` for torch, or 0 while torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):  # not yet imported to its end
        return 0
    found = _framework(torch)
    return 0 if found is None else ctypes.addressof(found)


@functools.cache
def _framework(torch: Any) -> Framework | None:
    exchange = _exchange_table(torch.Tensor)
    if not exchange:
        return None
    table = Framework(type=id(torch.Tensor), exchange=exchange)
    folder = Path(str(torch.__file__)).parent / "lib"
    try:
        making = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        wrapping = ctypes.CDLL(str(folder / "libtorch_python.so"))
        found = {name: _address(making, symbol) for name, symbol in _MAKING.items()}
        found["wrap"] = _address(wrapping, _WRAP)
    except (OSError, AttributeError):
        return table
    for name, address in found.items():
        setattr(table, name, address)
    return table


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
