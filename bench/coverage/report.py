"""The scorecards as docs/coverage.md: counts, then every failure by name and reason."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

from pliant.compare.results import stamp

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "coverage.md", ROOT / "bench" / "results"
KINDS = (
    *("pass", "wrong", "unsupported", "refused", "internal", "crash", "hang"),
    *("export_cannot", "eager_cannot", "not_run"),
)
APART = frozenset({"export_cannot", "eager_cannot", "not_run"})  # says nothing of ours
TITLES = {
    "opinfo": "OpInfo entries of torch.testing",
    "coreaten": "Core ATen overloads",
    "architectures": "Architectures of timm, transformers and diffusers",
    "onnx_nodes": "Node tests of ONNX",
    "onnx_dynamic": "Node tests of ONNX, every dim free",
    "onnx_wheels": "ONNX models of PyPI wheels",
}
OPENING = """# What of torch and ONNX compiles

Written by `make coverage` (ops of torch), `make coverage-models` (architectures) and
`make coverage-onnx` and `make coverage-wheels` (ONNX, judged as `onnx_nodes.py`,
`onnx_dynamic.py` and `onnx_wheels.py` of `bench/coverage` say). Each op of torch is
compiled with every dim dynamic (but those of size 1, which may be there to broadcast),
without fallback, and compared with eager at its own sizes and at others
(`bench/coverage/judge.py`); random ops are judged by shape, type and distribution, not
by value. Each architecture has random weights, a dynamic batch and, where the model has
one, a dynamic length or size (`bench/coverage/architecture.py`). They are small: those
of transformers and diffusers have few and narrow layers, and those of timm a few of the
blocks that repeat.
Every entry that does not pass is listed.
"""


def save(card: str, found: dict[str, dict[str, Any]], about: dict[str, str]) -> None:
    """The results of one card; the page is written anew."""
    content = {"stamp": stamp(0), "about": about, "entries": found}
    text = json.dumps(content, indent=0, sort_keys=True)
    (RESULTS / f"coverage_{card}.json").write_text(text + "\n")
    write_page()


def write_page() -> None:
    """The page of what is saved of all cards."""
    parts = [OPENING]
    for each, title in TITLES.items():
        path = RESULTS / f"coverage_{each}.json"
        if path.exists():
            parts.append(_card(title, json.loads(path.read_text())))
    PAGE.write_text("\n".join(parts))


def saved(card: str) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """What the last run was, and its entries."""
    content = json.loads((RESULTS / f"coverage_{card}.json").read_text())
    return content["about"], content["entries"]


def counts(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    kinds = collections.Counter(entry["kind"] for entry in found.values())
    return {kind: kinds[kind] for kind in KINDS if kinds[kind]}


def _card(title: str, content: dict[str, Any]) -> str:
    found = content["entries"]
    numbers = ", ".join(f"{n} {kind}" for kind, n in counts(found).items())
    about = ", ".join(f"{key} {value}" for key, value in content["about"].items())
    lines = [f"## {title}", "", f"{len(found)} entries: {numbers} ({about}).", ""]
    commits = sorted({e["commit"] for e in found.values() if "commit" in e})
    if commits:
        lines += [f"Entries are of the commits {', '.join(commits)}.", ""]
    if any(entry["kind"] == "not_run" for entry in found.values()):
        lines += [
            "The card is not complete. Those that have run are no sample of the rest:",
            "entries that a change was made for came first. Shares are of what ran.",
            "",
        ]
    lines += _libraries(found)
    apart = {n: e for n, e in found.items() if "_expanded" in n}
    for label, part in (
        ("primary", {n: e for n, e in found.items() if n not in apart}),
        ("expanded bodies", apart),
    ):
        if apart:
            shown = ", ".join(f"{n} {kind}" for kind, n in counts(part).items())
            lines += [f"- {label}: {len(part)}: {shown}"]
    lines += [""] if apart else []
    blocking = _blocking(found)
    if blocking:
        lines += ["| blocks | entries |", "| --- | --- |"]
        lines += [f"| {op} | {n} |" for op, n in blocking]
        lines.append("")
    for kind in KINDS[1:-1]:
        entries = {n: e for n, e in sorted(found.items()) if e["kind"] == kind}
        if entries:
            lines += [f"### {kind}", ""]
            lines += [f"- {name}: {_plain(e['text'])}" for name, e in entries.items()]
            lines.append("")
    narrow = {n: e for n, e in sorted(found.items()) if e["kind"] == "pass"}
    narrow = {n: e for n, e in narrow.items() if e["text"]}
    told = {n: e for n, e in narrow.items() if e["text"][:1].isdigit()}
    if told:
        lines += [
            "### pass",
            "",
            *(f"- {n}: {_plain(e['text'])}" for n, e in told.items()),
        ]
        lines.append("")
        narrow = {n: e for n, e in narrow.items() if n not in told}
    if narrow:
        lines += ["### pass, but refuse other sizes", "", ", ".join(narrow), ""]
    missing = sorted(n for n, e in found.items() if e["kind"] == "not_run")
    if missing:
        lines += ["### not run", "", ", ".join(missing), ""]
    return "\n".join(lines)


def _libraries(found: dict[str, dict[str, Any]]) -> list[str]:
    """Of entries such as timm/resnet18: a row for each library."""
    libraries = sorted({name.partition("/")[0] for name in found if "/" in name})
    if not libraries:
        return []
    lines = [
        "| library | entries | run | torch can export | pass |",
        "|" + " --- |" * 5,
    ]
    for library in (*libraries, ""):
        kinds = [e["kind"] for n, e in found.items() if n.startswith(library)]
        ran = len(kinds) - kinds.count("not_run")
        judged, passed = sum(k not in APART for k in kinds), kinds.count("pass")
        share = f" ({100 * passed / judged:.1f}%)" if judged else ""
        name = library or "all"
        lines.append(f"| {name} | {len(kinds)} | {ran} | {judged} | {passed}{share} |")
    return [*lines, ""]


def _blocking(found: dict[str, dict[str, Any]]) -> list[tuple[str, int]]:
    """Ops without a translation, by how many entries they keep from compiling."""
    ops: collections.Counter[str] = collections.Counter()
    for entry in found.values():
        if entry["kind"] == "unsupported":
            ops.update(set(re.findall(r"\b(?:aten|prims)\.\w+\.\w+", entry["text"])))
    return [(op, n) for op, n in ops.most_common() if n > 1]


def _plain(text: str) -> str:
    """On one line, without places of this machine, and without links: `x[0][1]`."""
    text = re.sub(r"(/[\w.+-]+)+/", "", text)
    return " ".join(text.split())[:300].replace("[", "\\[")
