"""A compiled model as a notebook shows it: dims, peak over a slider, kernels, speed."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """`peaks` are (size, bytes) over each dim, the others as in `dims`."""

    dims: Mapping[str, int]
    summary: str
    facts: Mapping[str, str]
    peaks: Mapping[str, Sequence[tuple[int, int]]]


def card(shown: Card) -> str:
    """HTML without scripts from elsewhere; each slider tells the peak at its size."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in shown.facts.items()
    )
    sliders = "".join(_slider(shown, dim, peaks) for dim, peaks in shown.peaks.items())
    return f"<div><b>compiled model</b><table>{rows}</table>{sliders}</div>"


def _slider(shown: Card, dim: str, peaks: Sequence[tuple[int, int]]) -> str:
    if not peaks:
        return ""
    texts = [
        f"{dim} = {size}: {count / MIB:.3f} MiB ({count} bytes)"
        for size, count in peaks
    ]
    others = ", ".join(f"{n}={k}" for n, k in shown.dims.items() if n != dim)
    first = min(range(len(peaks)), key=lambda k: abs(peaks[k][0] - shown.dims[dim]))
    change = f"this.nextElementSibling.textContent={texts!r}[this.value]"
    at = f" at {others}" if others else ""
    return (
        f"<div>peak over {html.escape(dim)}{html.escape(at)}<br>"
        f"<input type='range' min='0' max='{len(texts) - 1}' value='{first}' "
        f'oninput="{html.escape(change)}" style="width:320px"> '
        f"<span>{html.escape(texts[first])}</span></div>"
    )
