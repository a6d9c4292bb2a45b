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
SECONDS = 300  # of the processor: what else the machine does makes no row a hang

# What a run begins with: all mixtures of experts, then what an op or a pass of Pliant
# once failed at.
_FIRST = """
transformers/minimax transformers/deformable_detr transformers/mixtral
transformers/qwen2_moe transformers/deepseek_v3 transformers/gpt_oss
transformers/granitemoe transformers/olmoe transformers/llama4_text transformers/jetmoe
transformers/phimoe transformers/qwen3_moe transformers/dots1 transformers/glm4_moe
transformers/ernie4_5_moe transformers/nllb-moe transformers/switch_transformers
transformers/jamba diffusers/PixArtTransformer2DModel transformers/mpt transformers/fnet
transformers/lfm2 transformers/convbert transformers/vit_mae transformers/wav2vec2
transformers/hubert transformers/wavlm transformers/wav2vec2-conformer
transformers/rt_detr transformers/reformer transformers/mamba2 transformers/rwkv
transformers/recurrent_gemma timm/vit_tiny_patch16_224
timm/deit_tiny_distilled_patch16_224 timm/tnt_s_patch16_224 timm/volo_d1_224
timm/sequencer2d_s timm/vit_small_patch16_dinov3 timm/naflexvit_base_patch16_gap
transformers/qwen3_next
"""


@functools.cache
def entries() -> dict[str, Architecture]:
    return {
        **timm_models.entries(),
        **transformers_models.entries(),
        **diffusers_models.entries(),
    }


def names() -> list[str]:
    """The first ones, then each library's spread evenly: a run's beginning is a fair
    part of the rest."""
    libraries = (timm_models, transformers_models, diffusers_models)
    places = {
        name: place / len(made)
        for made in (library.entries() for library in libraries)
        for place, name in enumerate(made, 1)
    }
    first = _FIRST.split()
    rest = sorted(places.keys() - set(first), key=lambda name: (places[name], name))
    return [*first, *rest]


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
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return judge_architecture(entries()[name])
