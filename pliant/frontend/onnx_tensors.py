"""Tensors of an ONNX file: initializers, attributes, and data in files beside it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import external_data_helper, numpy_helper

from pliant.errors import ModelError
from pliant.frontend.onnx_limits import DENSE, LARGEST, RANK
from pliant.frontend.onnx_types import ELEMENTS, NAMES, Element
from pliant.frontend.onnx_values import Array, Known
from pliant.frontend.translate import Unsupported


def checked_size(dims: Any, name: str, bytes_each: int = 1) -> int:
    """The number of elements; ModelError for dims that no tensor has."""
    if any(d < 0 for d in dims):
        raise ModelError(f"tensor '{name}' has a negative dim: {list(dims)[:8]}")
    if len(dims) > RANK:
        raise ModelError(f"tensor '{name}' has {len(dims)} dims")
    size = math.prod(int(d) for d in dims)
    if size * bytes_each > LARGEST:
        raise ModelError(f"tensor '{name}' is too large: {list(dims)[:8]}")
    return size


def element_of(number: int, name: str) -> Element:
    element = ELEMENTS.get(number)
    if element is None:
        kind = NAMES.get(number, f"type {number}")
        raise Unsupported(
            f"'{name}' has elements of {kind}, which pliant does not have"
        )
    return element


def reader(folder: str | None) -> Callable[[onnx.TensorProto], Known]:
    """Reads tensors of a model whose files are in this folder."""

    def read(proto: onnx.TensorProto) -> Known:
        if proto.data_location != onnx.TensorProto.EXTERNAL:
            return known_tensor(proto)
        if folder is None:
            raise ModelError(
                f"the data of '{proto.name}' are in a file beside the model: compile "
                "its path, or load them with onnx.load"
            )
        held = onnx.TensorProto()
        held.name, held.data_type = proto.name, proto.data_type
        held.dims.extend(proto.dims)
        held.external_data.extend(proto.external_data)
        held.data_location = proto.data_location
        _check_place(proto, folder)
        try:
            external_data_helper.load_external_data_for_tensor(held, folder)
        except Exception as error:
            raise ModelError(
                f"the external data of '{proto.name}' cannot be read: {error}"
            ) from error
        return known_tensor(held)

    return read


def _check_place(proto: onnx.TensorProto, folder: str) -> None:
    """Data must be a plain file inside the model's folder, and as long as they say."""
    place = {e.key: e.value for e in proto.external_data}
    location = place.get("location", "")
    if "\0" in location:
        raise ModelError(f"the external data of '{proto.name}' are in no file")
    whole, root = os.path.join(folder, location), os.path.realpath(folder)
    inside = os.path.commonpath([os.path.realpath(whole), root]) == root
    if not location or os.path.isabs(location) or not inside:
        raise ModelError(
            f"the external data of '{proto.name}' are outside the model's folder: "
            f"{location!r}"
        )
    if os.path.islink(whole) or not os.path.isfile(whole):
        raise ModelError(
            f"the external data of '{proto.name}' are no plain file: {location!r}"
        )


def known_tensor(proto: onnx.TensorProto) -> Known:
    """The elements of a tensor, without a copy where the file has them as they are."""
    name = proto.name
    element = element_of(proto.data_type, name)
    size = checked_size(proto.dims, name)
    shape = tuple(int(d) for d in proto.dims)
    if proto.data_location == onnx.TensorProto.EXTERNAL and not proto.raw_data:
        raise ModelError(f"the data of '{name}' are in another file")
    kind = element.numpy
    if proto.raw_data and element.bits in (0, 8):
        if len(proto.raw_data) != size * kind.itemsize:
            raise ModelError(
                f"tensor '{name}' has {len(proto.raw_data)} bytes, but "
                f"{list(shape)} of {element.name} are {size * kind.itemsize}"
            )
        array: Array = np.frombuffer(proto.raw_data, kind).reshape(shape)
        return Known(array, element, name)
    try:
        array = np.asarray(numpy_helper.to_array(proto)).reshape(shape)
    except Exception as error:
        raise ModelError(f"tensor '{name}' is malformed: {error}") from error
    return Known(array.astype(kind, copy=False), element, name)


def dense(
    sparse: onnx.SparseTensorProto, read: Callable[[onnx.TensorProto], Known]
) -> Known:
    """A sparse tensor as all its elements."""
    values, name = read(sparse.values), sparse.values.name
    size = checked_size(sparse.dims, name, values.array.itemsize)
    if size > DENSE:
        raise ModelError(
            f"sparse tensor '{name}' is too large: {list(sparse.dims)[:8]}"
        )
    places = np.asarray(read(sparse.indices).array)
    shape = tuple(int(d) for d in sparse.dims)
    if places.ndim == 2 and places.shape[1] != len(shape):
        raise ModelError(f"sparse tensor '{name}' has places of another rank")
    if places.ndim == 2:
        columns = [places[:, i] for i in range(places.shape[1])]
        pairs = zip(columns, shape, strict=True)
        if any((c < 0).any() or (c >= n).any() for c, n in pairs):
            raise ModelError(f"sparse tensor '{name}' has places outside its shape")
        places = np.ravel_multi_index(columns, shape)
    if places.size != values.array.size or places.size > size:
        raise ModelError(f"sparse tensor '{name}' has places that do not fit")
    if places.size and not 0 <= int(places.min()) <= int(places.max()) < size:
        raise ModelError(f"sparse tensor '{name}' has places outside its shape")
    array = np.zeros(size, values.array.dtype)
    array[places] = values.array.reshape(-1)
    return Known(array.reshape(shape), values.element, name)
