"""Versions of `main` that were read from a text share what they have in common."""

from __future__ import annotations

from pliant.context import Context
from pliant.ir.parse import parse_module
from pliant.ir.text import print_module
from pliant.ir.versions import with_shared_ops
from pliant.machine.target import named
from pliant.options import Options
from pliant.pipeline import run_stages


def body(name: str, axis: int) -> str:
    """A transposed input, a kernel that reads it, and one that reads its result."""
    return f"""graph @{name}(%x: f32[n, n]) {{
  %t: f32[n, n] = transpose(%x) {{perm = ({axis}, {1 - axis})}}
  %y: f32[n, n] = fusion(%t) {{kind = "map"}}
    region @map_0(%a: f32[n, n]) {{
      %e: f32[n, n] = exp(%a)
      return %e
    }}
  %z: f32[n, n] = fusion(%y) {{kind = "map"}}
    region @map_1(%a: f32[n, n]) {{
      %e: f32[n, n] = neg(%a)
      return %e
    }}
  return %z
}}

"""


def test_equal_ops_are_one() -> None:
    text = body("main", 1) + body("main.1", 1)
    module = with_shared_ops(parse_module(text))
    (version,) = module.versions
    assert version.ops == module.main.ops and version.params == module.main.params
    assert print_module(module) == print_module(parse_module(text))


def test_another_view_makes_another_kernel() -> None:
    module = with_shared_ops(parse_module(body("main", 1) + body("main.1", 0)))
    (version,) = module.versions
    same = [a is b for a, b in zip(module.main.ops, version.ops, strict=True)]
    assert same == [False, False, True]


def test_a_kernel_of_two_versions_is_lowered_once() -> None:
    module = parse_module(body("main", 1) + body("main.1", 1))
    cx = Context(Options(), named("avx2"))
    lowered = run_stages(module, cx, "lower", first="lower")
    assert set(lowered.graphs) == {"main", "main.1", "map_0", "map_1"}
