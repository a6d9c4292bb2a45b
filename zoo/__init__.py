"""The models that tests and benchmarks run, built from configurations in this folder.

    case = zoo.build("bert")                          # as the table says
    case = zoo.build("bert", layers=1, hidden=128)    # smaller
    compiled = case.compile()

Every family of architectures has a file, which is imported when one of its models is
built; `table.py` says what each model is. Weights are random and the same in every
process, except those of `minilm`, which were trained. `python -m zoo` lists the models.
"""

from __future__ import annotations

import importlib
import os

import torch

from pliant.cases import Case
from pliant.errors import OptionError
from zoo.table import MODELS, ZooModel

__all__ = ["MODELS", "Model", "build", "named"]

SEED = 0


def named(name: str) -> ZooModel:
    """What the table says of a model."""
    if name not in MODELS:
        raise OptionError(f"no model '{name}' in the zoo: {', '.join(MODELS)}")
    return MODELS[name]


def build(name: str, **options: int) -> Case:
    """A model and its inputs; `options` are those of its function."""
    model = named(name)
    sizes = model.sizes
    # transformers reads these when it is imported: no download, no progress bars.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        function = getattr(importlib.import_module(f"zoo.{model.family}"), name)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            module, inputs = function(**options)
    except ModuleNotFoundError as missing:
        raise OptionError(
            f"the zoo's '{name}' needs the package '{missing.name}': "
            "pip install 'pliant[test]'"
        ) from missing
    return Case(
        name,
        module.eval(),
        inputs,
        model.dynamic_shapes,
        sizes.dims,
        sizes.example,
        sizes.shapes,
        label=model.label(options),
    )
