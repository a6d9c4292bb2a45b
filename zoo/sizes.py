"""The dims of the models, and the sizes at which they are exported and measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pliant.cases import Shape


@dataclass(frozen=True, slots=True)
class MeasuredSizes:
    """For all models that have the same dims."""

    dims: tuple[str, ...]
    example: Shape  # to export with
    shapes: tuple[Shape, ...]  # to time: from one of each to many, odd and even
    long: tuple[Shape, ...]  # where most of what a call holds is activations


TEXT = MeasuredSizes(
    ("batch", "seq"),
    (2, 13),
    (
        *((1, 7), (1, 32), (1, 100), (1, 257)),
        *((2, 64), (4, 37), (8, 128), (1, 500)),
    ),
    ((8, 128), (1, 1500)),
)
SHORT_TEXT = replace(TEXT, long=((8, 128), (1, 500)))  # for 512 positions
PATCHES = MeasuredSizes(  # of 16 x 16 pixels, along each side of a square image
    ("batch", "patches"),
    (2, 9),
    (
        *((1, 4), (1, 7), (1, 14), (1, 20)),
        *((2, 14), (4, 9), (8, 14), (1, 24)),
    ),
    ((8, 14), (1, 40)),
)
IMAGE = MeasuredSizes(
    ("batch", "height", "width"),
    (2, 96, 80),
    (
        *((1, 96, 80), (1, 160, 160), (1, 224, 224), (1, 321, 251)),
        *((2, 130, 190), (4, 112, 112), (4, 224, 224), (1, 480, 640)),
    ),
    ((4, 224, 224), (1, 640, 800)),
)
RESIDUES = MeasuredSizes(
    ("batch", "residues"),
    (2, 13),
    (
        *((1, 13), (1, 32), (1, 48), (1, 64)),
        *((1, 100), (2, 48), (4, 24), (1, 128)),
    ),
    ((1, 128), (1, 200)),
)
LATENT = (
    MeasuredSizes(  # the side of a square latent in steps of 8, and tokens of the text
        ("batch", "side", "text"),
        (2, 4, 7),
        (
            *((1, 2, 7), (1, 3, 20), (1, 4, 77), (1, 6, 77)),
            *((1, 8, 77), (2, 4, 20), (4, 4, 77), (2, 6, 13)),
        ),
        ((2, 6, 77), (1, 12, 77)),
    )
)
