"""What there is in the zoo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.export import Dim

from zoo import sizes
from zoo.sizes import MeasuredSizes


@dataclass(frozen=True, slots=True)
class ZooModel:
    """One model: a function of its name in the file of its family builds it."""

    family: str
    depth: str
    parameters: int
    sizes: MeasuredSizes
    dynamic_shapes: tuple[Any, ...]  # of its inputs, as torch.export takes them
    weights: str = "random"

    def label(self, options: Mapping[str, int]) -> str:
        """What tables call it; built with options it is as deep as these say."""
        changed = ", ".join(f"{name}={value}" for name, value in options.items())
        return f"{changed or self.depth}, {self.weights} weights"


# An axis that is dynamic must stay so in the export; one that may is fixed where the
# architecture demands it.
MUST, MAY = Dim.DYNAMIC, Dim.AUTO
TOKENS = {0: MUST, 1: MUST}
IMAGE = {0: MUST, 2: MAY, 3: MAY}
PAIRS = {0: MUST, 1: MUST, 2: MUST}

MODELS: dict[str, ZooModel] = {
    "bert": ZooModel(
        "bert", "4 layers", 52_188_672, sizes.SHORT_TEXT, (TOKENS, TOKENS)
    ),
    # Its kernels are so small that what is done around them counts.
    "tinybert": ZooModel(
        "bert", "4 layers", 4_765_952, sizes.SHORT_TEXT, (TOKENS, TOKENS)
    ),
    "minilm": ZooModel(
        "bert", "6 layers", 22_713_216, sizes.SHORT_TEXT, (TOKENS, TOKENS), "real"
    ),
    "gpt2": ZooModel("gpt2", "4 layers", 79_533_312, sizes.TEXT, (TOKENS,)),
    "llama": ZooModel("llama", "4 layers", 74_324_736, sizes.TEXT, (TOKENS,)),
    "t5_encoder": ZooModel("t5", "2 layers", 22_743_808, sizes.TEXT, (TOKENS, TOKENS)),
    "vit": ZooModel("vit", "4 layers", 29_095_680, sizes.PATCHES, (IMAGE,)),
    "resnet": ZooModel("resnet", "8 blocks", 13_946_176, sizes.IMAGE, (IMAGE,)),
    "evoformer": ZooModel(
        "evoformer", "1 block", 14_293_888, sizes.RESIDUES, (TOKENS, PAIRS, TOKENS)
    ),
    "unet": ZooModel(
        *("unet", "5 blocks", 12_490_244, sizes.LATENT), (IMAGE, None, TOKENS)
    ),
}
