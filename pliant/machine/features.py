"""The instructions that this machine offers, told without LLVM.

Code in a file lists the features that it was compiled with by LLVM's names. The system
reports those of the processor by names of its own, as far as it lets processes use
them.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

# LLVM's names of features that change which instructions it generates, and Linux's
# names of them where these differ.
_OTHERWISE = {
    "64bit": "lm",
    "amx-bf16": "amx_bf16",
    "amx-complex": "amx_complex",
    "amx-fp16": "amx_fp16",
    "amx-int8": "amx_int8",
    "amx-tile": "amx_tile",
    "avx512bf16": "avx512_bf16",
    "avx512bitalg": "avx512_bitalg",
    "avx512fp16": "avx512_fp16",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxifma": "avx_ifma",
    "avxneconvert": "avx_ne_convert",
    "avxvnni": "avx_vnni",
    "avxvnniint16": "avx_vnni_int16",
    "avxvnniint8": "avx_vnni_int8",
    "bmi": "bmi1",
    "crc32": "sse4_2",
    "lzcnt": "abm",
    "pclmul": "pclmulqdq",
    "prfchw": "3dnowprefetch",
    "sahf": "lahf_lm",
    "sha": "sha_ni",
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
}
_ALIKE = (
    *("adx", "aes", "avx", "avx2", "avx512bw", "avx512cd", "avx512dq", "avx512f"),
    *("avx512ifma", "avx512vbmi", "avx512vl", "bmi2", "cmov", "cx16", "cx8", "f16c"),
    *("fma", "fma4", "fxsr", "gfni", "mmx", "movbe", "popcnt", "sha512", "sm3", "sm4"),
    *("sse", "sse2", "sse4a", "ssse3", "tbm", "vaes", "vpclmulqdq", "xop"),
)
_LINUX = {**_OTHERWISE, **{name: name for name in _ALIKE}}
# Instructions of systems, of special purposes, and of marks that older processors skip:
# LLVM generates none of them unasked.
_SPECIAL = frozenset(
    {
        *("cldemote", "clflushopt", "clwb", "clzero", "cmpccxadd", "enqcmd"),
        *("fsgsbase", "hreset", "invpcid", "kl", "lwp", "movdir64b", "movdiri"),
        *("movrs", "mwaitx", "pconfig", "pku", "prefetchi", "ptwrite", "raoint"),
        *("rdpid", "rdpru", "rdrnd", "rdseed", "rtm", "serialize", "sgx", "shstk"),
        *("tsxldtrk", "uintr", "usermsr", "waitpkg", "wbnoinvd", "widekl", "xsave"),
        *("xsavec", "xsaveopt", "xsaves"),
    }
)


def needed(features: Iterable[str]) -> tuple[str, ...]:
    """Of a target's features ("+avx2", "-sgx"), those that its code may need."""
    used = (feature[1:] for feature in features if feature.startswith("+"))
    return tuple(sorted(name for name in used if name not in _SPECIAL))


def lacking(wanted: Iterable[str]) -> tuple[str, ...]:
    """Of these features, those that this machine lacks, or that nothing is known of."""
    here = _present()
    return tuple(name for name in wanted if _LINUX.get(name) not in here)


def architecture() -> str:
    """This machine's, by the first word of LLVM's triples."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@lru_cache(maxsize=1)
def _present(info: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The flags of the first processor; none where the system does not tell."""
    try:
        with info.open() as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()
