"""Architectures of timm, transformers and diffusers, with random weights."""

from __future__ import annotations

import functools
import logging
import resource
import warnings

from bench.coverage import diffusers_models, timm_models, transformers_models
from bench.coverage.architecture import Architecture, judge_architecture
from bench.coverage.judge import Verdict

FORKED = True  # what a library leaves behind does not meet the next model
MEMORY = 12 * 2**30  # address space of a process: an architecture that needs more fails


@functools.cache
def entries() -> dict[str, Architecture]:
    return {
        **timm_models.entries(),
        **transformers_models.entries(),
        **diffusers_models.entries(),
    }


def names() -> list[str]:
    """Those of each library spread evenly, so that a run's beginning is a fair part."""
    libraries = (timm_models, transformers_models, diffusers_models)
    places = {
        name: place / len(made)
        for made in (library.entries() for library in libraries)
        for place, name in enumerate(made, 1)
    }
    return sorted(places, key=places.__getitem__)


def prepare() -> None:
    """What all entries import, once for all of them."""
    import diffusers
    import torch._dynamo
    import torch._higher_order_ops
    import transformers

    timm_models.imported()
    _ = diffusers.ModelMixin, transformers.AutoModel, torch._dynamo.export


def evaluate(name: str) -> Verdict:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return judge_architecture(entries()[name])
