"""A model of every module of timm: batch and, where the model allows, size are dynamic.

timm imports torchvision, whose build for this torch may lack its compiled ops; timm
needs none of them. torchvision may be in a folder of its own (`TORCHVISION`), so that
the environment need not have it: `make coverage-models` puts it there.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.coverage.architecture import Architecture, image

TORCHVISION = Path(tempfile.gettempdir()) / "pliant_coverage" / "torchvision"

# By module: one of its smallest models. Names that end in a number behind @ are tried
# at that size and not at 224.
_NAMES = """
beit_base_patch16_224 botnet26t_256@256 gcresnet33ts cait_xxs24_224 coat_lite_tiny
convit_tiny convmixer_768_32 convnext_atto cpubone_nano crossvit_9_240@240 csatv2@512
cs3darknet_s cspnext_tiny davit_tiny deit_tiny_patch16_224
deit_tiny_distilled_patch16_224 densenet121 dla46_c dpn68 edgenext_xx_small@256
efficientformer_l1 efficientformerv2_s0 efficientnet_b0 mnasnet_small mobilenetv2_050
efficientvim_m1 efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0
fastvit_t8@256 focalnet_tiny_srf gcvit_xxtiny ghostnet_050 ghostnetv2_100
hardcorenas_a hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny@256 hrnet_w18_small iformer_t
inception_next_atto inception_resnet_v2@299 inception_v3@299 inception_v4@299
lcnetv2_small levit_128s lowformer_b0 mambaout_femto coatnet_pico_rw_224
maxvit_pico_rw_256@256 poolformer_s12 caformer_s18 mixer_s32_224 resmlp_12_224
gmlp_ti16_224 lcnet_035 mobilenetv3_small_050 fbnetv3_b mobilenetv5_base@256
mobilevit_xxs@256 mobilevitv2_050@256 mvitv2_tiny naflexvit_base_patch16_gap@384
nest_tiny nextvit_small nf_resnet26 pit_ti_224 pvt_v2_b0 rdnet_tiny regnetx_002
regnety_002 repghostnet_050 repvit_m0_9 res2net50_14w_8s resnest14d resnet18 resnet50
resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18
starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256@256
swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m twins_svt_small
twins_pcpvt_small vgg11 visformer_tiny vit_tiny_patch16_224
vit_small_patch16_dinov3@256 vit_tiny_r_s16_p8_224 vit_relpos_small_patch16_224
samvit_base_patch16_224 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw
xception41@299 legacy_xception@299 xcit_nano_12_p16_224 nasnetalarge@331
pnasnet5large@331 qwen3_vit_88m gemma4_vit_167m deepseek_vit_412m@384
"""
NAMES = _NAMES.split()

# The smallest of its module is large: fewer layers of it.
DEPTHS = {"deepseek_vit_412m": 2, "gemma4_vit_167m": 2}


def entries() -> dict[str, Architecture]:
    return {f"timm/{name.partition('@')[0]}": _entry(name) for name in NAMES}


def _entry(name: str) -> Architecture:
    plain, _, size = name.partition("@")
    side = int(size or 224)

    def build() -> torch.nn.Module:
        depth = {"depth": DEPTHS[plain]} if plain in DEPTHS else {}
        made: torch.nn.Module = imported().create_model(plain, False, **depth)
        return made

    # Another size is tried where eager takes it; batch 1 and 3 at the model's own.
    sizes = [(2, side, side), (1, side, side), (3, side, side), (1, side + 32, side)]
    return Architecture(build, lambda n, h, w: (image(n, 3, h, w),), _DIMS, sizes)


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
