"""A model of every module of timm: batch and, where the model allows, size are dynamic.

The models are the library's own, but for two things that only cost time: of blocks that
repeat, a few are left (`thinned`), and models for any size are given small images.

timm imports torchvision, whose build for this torch may lack its compiled ops; timm
needs none of them. torchvision may be in a folder of its own (`TORCHVISION`), so that
the environment need not have it: `make coverage-models` puts it there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.coverage.architecture import Architecture, image

TORCHVISION = Path(tempfile.gettempdir()) / "pliant_coverage" / "torchvision"

# By module: one of its smallest models. Names that end in a number behind @ are tried
# at that size and not at 224: those that take any size at a small one.
_NAMES = """
beit_base_patch16_224 botnet26t_256@256 gcresnet33ts@96 cait_xxs24_224 coat_lite_tiny
convit_tiny convmixer_768_32@96 convnext_atto@96 cpubone_nano@96 crossvit_9_240@240
csatv2@128 cs3darknet_s@96 cspnext_tiny@96 davit_tiny@96 deit_tiny_patch16_224
deit_tiny_distilled_patch16_224 densenet121@96 dla46_c@96 dpn68@96 edgenext_xx_small@96
efficientformer_l1 efficientformerv2_s0 efficientnet_b0@96 mnasnet_small@96
mobilenetv2_050@96 efficientvim_m1@96 efficientvit_b0@96 efficientvit_m0
eva02_tiny_patch14_224 fasternet_t0@96 fastvit_t8@96 focalnet_tiny_srf@96 gcvit_xxtiny
ghostnet_050@96 ghostnetv2_100@96 hardcorenas_a@96 hgnetv2_b0@96 hiera_tiny_224
sam2_hiera_tiny@256 hrnet_w18_small@96 iformer_t@96 inception_next_atto@96
inception_resnet_v2@107 inception_v3@107 inception_v4@107 lcnetv2_small@96 levit_128s
lowformer_b0@96 mambaout_femto@96 coatnet_pico_rw_224 maxvit_pico_rw_256@256
poolformer_s12@96 caformer_s18@96 mixer_s32_224 resmlp_12_224 gmlp_ti16_224 lcnet_035@96
mobilenetv3_small_050@96 fbnetv3_b@96 mobilenetv5_base@96 mobilevit_xxs@96
mobilevitv2_050@96 mvitv2_tiny naflexvit_base_patch16_gap@384 nest_tiny nextvit_small@96
nf_resnet26@96 pit_ti_224 pvt_v2_b0@96 rdnet_tiny@96 regnetx_002@96 regnety_002@96
repghostnet_050@96 repvit_m0_9@96 res2net50_14w_8s@96 resnest14d@96 resnet18@96
resnet50@96 resnetv2_18@96 rexnet_100@96 selecsls42@96 legacy_seresnet18@96
sequencer2d_s shvit_s1@96 skresnet18@96 starnet_s050@96 swiftformer_xs
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256@256 swinv2_cr_tiny_224
tiny_vit_5m_224@96 tnt_s_patch16_224 tresnet_m@96 twins_svt_small twins_pcpvt_small
vgg11@96 visformer_tiny vit_tiny_patch16_224 vit_small_patch16_dinov3@256
vit_tiny_r_s16_p8_224 vit_relpos_small_patch16_224 samvit_base_patch16_224
vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw@96 xception41@107
legacy_xception@107 xcit_nano_12_p16_224 nasnetalarge@128 pnasnet5large@128
qwen3_vit_88m gemma4_vit_167m deepseek_vit_412m@384
"""
NAMES = _NAMES.split()

# The smallest of its module is large: fewer layers of it.
DEPTHS = {"deepseek_vit_412m": 2, "gemma4_vit_167m": 2}


def entries() -> dict[str, Architecture]:
    return {f"timm/{name.partition('@')[0]}": _entry(name) for name in NAMES}


def _entry(name: str) -> Architecture:
    plain, _, size = name.partition("@")
    side = int(size or 224)

    def made() -> torch.nn.Module:
        depth = {"depth": DEPTHS[plain]} if plain in DEPTHS else {}
        model: torch.nn.Module = imported().create_model(plain, False, **depth)
        return model.eval()

    def build() -> torch.nn.Module:
        return thinned(made, image(2, 3, side, side))

    # Another size is tried where eager takes it; batch 1 and 3 at the model's own.
    sizes = [(2, side, side), (1, side, side), (3, side, side), (1, side + 32, side)]
    return Architecture(build, lambda n, h, w: (image(n, 3, h, w),), _DIMS, sizes)


def thinned(
    made: Callable[[], torch.nn.Module], example: torch.Tensor
) -> torch.nn.Module:
    """A model without blocks that only repeat the two kinds of blocks before them.

    As it was made, if its code counts on the number of blocks.
    """
    model = made()
    for blocks in list(model.modules()):
        if isinstance(blocks, torch.nn.Sequential | torch.nn.ModuleList):
            kinds = [_kind(block) for block in blocks]
            for i in reversed(range(3, len(kinds))):
                if kinds[i] == kinds[i - 2] and kinds[i - 1] == kinds[i - 3]:
                    del blocks[i]
    try:
        with torch.no_grad():
            model(example)
    except Exception:  # whatever its code makes of missing blocks
        return made()
    return model


def _kind(block: torch.nn.Module) -> list[Any]:
    """Whatever two blocks of the same kind share: classes, settings, shapes."""
    return [
        (
            name,
            type(part),
            [(key, x.shape) for key, x in part.named_parameters(recurse=False)],
            [(k, v) for k, v in sorted(vars(part).items()) if _is_setting(k, v)],
        )
        for name, part in block.named_modules()
    ]


def _is_setting(name: str, value: Any) -> bool:
    """Of a layer's number and of how often it is dropped, eval() knows nothing."""
    if isinstance(value, tuple | list):
        return all(_is_setting(name, item) for item in value)
    return isinstance(value, bool | int | str) and not name.startswith("layer_")


_DIMS: Any = ({0: "batch", 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO},)


def imported() -> Any:
    """timm, with torchvision's ops left undeclared."""
    if TORCHVISION.exists() and str(TORCHVISION) not in sys.path:
        sys.path.append(str(TORCHVISION))
    declare = torch.library.register_fake

    def but_torchvision(op: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(op, str) and op.startswith("torchvision"):
            return lambda function: function
        return declare(op, *args, **kwargs)

    torch.library.register_fake = but_torchvision
    try:
        import timm
    finally:
        torch.library.register_fake = declare
    return timm
