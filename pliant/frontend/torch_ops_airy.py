"""The Airy function Ai, in f64: its power series around 0, rational functions beyond.

The coefficients are those of Cephes (airy.c), the highest power first. There, the two
denominators for negative numbers begin with a power whose coefficient is 1. torch
leaves it out, which changes results between -2.1 and -3 by up to 2e-5 of themselves. So
do these: a compiled model gives what eager gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_bessel import narrow
from pliant.frontend.torch_ops_context import TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.ir.graph import Value
from pliant.ir.types import DType

aten = torch.ops.aten

_NEAR = 2.09  # where the series ends
_TERMS = 24  # the last one is below 1e-20 there
_AT_0, _SLOPE = 0.355028053887817239260, 0.258819403792806798405
_ROOT = 1 / math.sqrt(math.pi)

_RIGHT = (
    (
        *(3.46538101525629032477e-01, 1.20075952739645805542e01),
        *(7.62796053615234516538e01, 1.68089224934630576269e02),
        *(1.59756391350164413639e02, 7.05360906840444183113e01),
        *(1.40264691163389668864e01, 9.99999999999999995305e-01),
    ),
    (
        *(5.67594532638770212846e-01, 1.47562562584847203173e01),
        *(8.45138970141474626562e01, 1.77318088145400459522e02),
        *(1.64234692871529701831e02, 7.14778400825575695274e01),
        *(1.40959135607834029598e01, 1.00000000000000000470e00),
    ),
)
_LEFT_SIN = (
    (
        *(-1.31696323418331795333e-01, -6.26456544431912369773e-01),
        *(-6.93158036036933542233e-01, -2.79779981545119124951e-01),
        *(-4.91900132609500318020e-02, -4.06265923594885404393e-03),
        *(-1.59276496239262096340e-04, -2.77649108155232920844e-06),
        -1.67787698489114633780e-08,
    ),
    (
        *(1.33560420706553243746e01, 3.26825032795224613948e01),
        *(2.67367040941499554804e01, 9.18707402907259625840e00),
        *(1.47529146771666414581e00, 1.15687173795188044134e-01),
        *(4.40291641615211203805e-03, 7.54720348287414296618e-05),
        4.51850092970580378464e-07,
    ),
)
_LEFT_COS = (
    (
        *(1.97339932091685679179e-02, 3.91103029615688277255e-01),
        *(1.06579897599595591108e00, 9.39169229816650230044e-01),
        *(3.51465656105547619242e-01, 6.33888919628925490927e-02),
        *(5.85804113048388458567e-03, 2.82851600836737019778e-04),
        *(6.98793669997260967291e-06, 8.11789239554389293311e-08),
        3.41551784765923618484e-10,
    ),
    (
        *(9.30892908077441974853e00, 1.98352928718312140417e01),
        *(1.55646628932864612953e01, 5.47686069422975497931e00),
        *(9.54293611618961883998e-01, 8.64580826352392193095e-02),
        *(4.12656523824222607191e-03, 1.01259085116509135510e-04),
        *(1.17166733214413521882e-06, 4.91834570062930015649e-09),
    ),
)


def _polynomial(cx: TorchContext, x: Value, coefficients: Sequence[float]) -> Value:
    found = cx.tensor(coefficients[0], DType.F64)
    for c in coefficients[1:]:
        found = cx.add(cx.mul(found, x), c)
    return found


def _ratio(
    cx: TorchContext, x: Value, parts: tuple[Sequence[float], Sequence[float]]
) -> Value:
    return cx.div(_polynomial(cx, x, parts[0]), _polynomial(cx, x, parts[1]))


def _series(cx: TorchContext, x: Value) -> Value:
    """Ai(0) f(x) + Ai'(0) g(x), whose terms have the ratio x**3 / ((k-1) k)."""
    cube = cx.mul(cx.mul(x, x), x)
    f, g = cx.tensor(1.0, DType.F64), cx.tensor(1.0, DType.F64)
    for k in range(3 * _TERMS, 0, -3):  # by Horner's rule
        f = cx.add(cx.mul(f, cx.mul(cube, 1.0 / (k * (k - 1)))), 1.0)
        g = cx.add(cx.mul(g, cx.mul(cube, 1.0 / (k * (k + 1)))), 1.0)
    return cx.sub(cx.mul(f, _AT_0), cx.mul(cx.mul(g, x), _SLOPE))


def _airy(cx: TorchContext, x: Value) -> Value:
    size = cx.unary("abs", x)
    far = cx.arith("maximum", size, _NEAR)
    zeta = cx.mul(cx.mul(far, cx.unary("sqrt", far)), 2.0 / 3.0)
    z = cx.div(1.0, zeta)
    scale = cx.div(_ROOT, cx.unary("sqrt", cx.unary("sqrt", far)))
    falling = cx.mul(cx.unary("exp", cx.unary("neg", zeta)), 0.5)
    right = cx.mul(cx.mul(scale, falling), _ratio(cx, z, _RIGHT))
    square, turn = cx.mul(z, z), cx.add(zeta, math.pi / 4)
    sine = cx.add(cx.mul(square, _ratio(cx, square, _LEFT_SIN)), 1.0)
    cosine = cx.mul(z, _ratio(cx, square, _LEFT_COS))
    waves = cx.sub(
        cx.mul(cx.unary("sin", turn), sine), cx.mul(cx.unary("cos", turn), cosine)
    )
    beyond = cx.select(cx.arith("gt", x, 0.0), right, cx.mul(scale, waves))
    near = cx.arith("le", size, _NEAR)
    found = cx.select(near, _series(cx, cx.select(near, x, 0.0)), beyond)
    return cx.select(cx.unary("isinf", x), math.nan, found)


AIRY: dict[Any, Translate] = {aten.special_airy_ai.default: narrow(_airy)}
