"""Every stage of the graph on a small text: what goes in, what comes out.

Each text is verified and interpreted before and after. A stage that is neither here nor
in test_stage_text_lowered.py fails `test_every_stage_is_here`.
"""

from __future__ import annotations

import test_stage_text_lowered
from stage_text import expect, opt

from pliant.pipeline import STAGES

ATTENTION = """
graph @main(%q: f32[n, 2, 4], %k: f32[n, 3, 4], %v: f32[n, 3, 4]) {
  %t: f32[n, 4, 3] = transpose(%k) {perm = (0, 2, 1)}
  %s: f32[n, 2, 3] = matmul(%q, %t)
  %top: f32[n, 2, 1] = reduce(%s) {op = "max", axes = (2), keepdims = true}
  %wide: f32[n, 2, 3] = broadcast(%top) {shape = [n, 2, 3], axes = (0, 1, 2)}
  %below: f32[n, 2, 3] = sub(%s, %wide)
  %e: f32[n, 2, 3] = exp(%below)
  %sum: f32[n, 2, 1] = reduce(%e) {op = "sum", axes = (2), keepdims = true}
  %all: f32[n, 2, 3] = broadcast(%sum) {shape = [n, 2, 3], axes = (0, 1, 2)}
  %w: f32[n, 2, 3] = div(%e, %all)
  %y: f32[n, 2, 4] = matmul(%w, %v)
  return %y
}
"""


def test_every_stage_is_here() -> None:
    names = {stage.name for stage in STAGES}
    here = (*globals(), *vars(test_stage_text_lowered))
    assert names <= {name.removeprefix("test_") for name in here}


def test_inline() -> None:
    text = """
    graph @main(%x: f32[n]) {
      %y: f32[2*n] = call(%x) {callee = "twice", sizes = ()}
      return %y
    }
    graph @twice(%a: f32[m]) {
      %b: f32[2*m] = concat(%a, %a) {axis = 0}
      return %b
    }
    """
    expect(
        opt(text, "inline"),
        """\
graph @main(%x: f32[n]) {
  %b: f32[2*n] = concat(%x, %x) {axis = 0}
  return %b
}
""",
    )


def test_bind() -> None:
    text = """
    graph @main(%x: f32[n], %m: bool[n]) {
      constraint u <= n
      %i: i64[u, 1] = nonzero(%m)
      %at: i64[u] = reshape(%i) {shape = [u]}
      %y: f32[u] = index(%x, %at)
      return %y
    }
    """
    expect(
        opt(text, "bind"),
        """\
graph @main(%x: f32[n], %m: bool[n]) {
  %locate: i64[n, 1], %locate_1: i64[] = locate(%m) {rows = <n>}
  %bind: f32[n] = bind(%locate_1, %locate, %x) {most = [n]}
    region @bound(%locate: i64[n, 1], %x: f32[n]) sizes (u) {
      constraint u <= n
      %i: i64[u, 1] = slice(%locate) {starts = [0, 0], shape = [u, 1], steps = (1, 1)}
      %at: i64[u] = reshape(%i) {shape = [u]}
      %y: f32[u] = index(%x, %at)
      return %y
    }
  return %bind, %locate_1
}
""",
    )


def test_joins() -> None:
    text = """
    graph @main(%x: f32[n, 4], %y: f32[n, 4]) {
      %a: f32[n, 8] = concat(%x, %y) {axis = 1}
      %b: f32[n, 4] = slice(%a) {starts = [0, 4], shape = [n, 4], steps = (1, 1)}
      %c: f32[n, 8] = concat(%x, %b) {axis = 1}
      return %c
    }
    """
    expect(
        opt(text, "joins"),
        """\
graph @main(%x: f32[n, 4], %y: f32[n, 4]) {
  %concat: f32[n, 8] = concat(%x, %y) {axis = 1}
  return %concat
}
""",
    )


def test_canonicalize() -> None:
    text = """
    graph @main(%x: f32[n]) {
      %one: f32[n] = full() {value = 1.0, dtype = f32, shape = [n]}
      %y: f32[n] = mul(%x, %one)
      %a: f32[n] = exp(%y)
      %b: f32[n] = exp(%x)
      %dead: f32[n] = neg(%b)
      %z: f32[n] = add(%a, %b)
      return %z
    }
    """
    expect(
        opt(text, "canonicalize"),
        """\
graph @main(%x: f32[n]) {
  %a: f32[n] = exp(%x)
  %z: f32[n] = add(%a, %a)
  return %z
}
""",
    )


def test_smooth() -> None:
    text = """
    graph @main(%x: f32[n]) {
      %y: f32[n] = silu(%x)
      %z: f32[n] = relu(%y)
      return %z
    }
    """
    expect(
        opt(text, "smooth", train=("x",)),
        """\
graph @main(%x: f32[n]) {
  %sigmoid: f32[n] = sigmoid(%x)
  %mul: f32[n] = mul(%x, %sigmoid)
  %full: f32[] = full() {value = 0.0, dtype = f32, shape = ()}
  %broadcast: f32[n] = broadcast(%full) {shape = [n], axes = ()}
  %le: bool[n] = le(%mul, %broadcast)
  %broadcast_1: f32[n] = broadcast(%full) {shape = [n], axes = ()}
  %select: f32[n] = select(%le, %broadcast_1, %mul)
  return %select
}
""",
    )


def test_decompose() -> None:
    text = """
    graph @main(%x: f32[n, 8]) {
      %y: f32[n, 8] = softmax(%x) {axis = 1}
      return %y
    }
    """
    expect(
        opt(text, "decompose"),
        """\
graph @main(%x: f32[n, 8]) {
  %reduce: f32[n, 1] = reduce(%x) {op = "max", axes = (1), keepdims = true}
  %broadcast: f32[n, 8] = broadcast(%reduce) {shape = [n, 8], axes = (0, 1)}
  %sub: f32[n, 8] = sub(%x, %broadcast)
  %exp: f32[n, 8] = exp(%sub)
  %reduce_1: f32[n, 1] = reduce(%exp) {op = "sum", axes = (1), keepdims = true}
  %broadcast_1: f32[n, 8] = broadcast(%reduce_1) {shape = [n, 8], axes = (0, 1)}
  %div: f32[n, 8] = div(%exp, %broadcast_1)
  return %div
}
""",
    )


def test_plain() -> None:
    text = """
    graph @main(%x: f32[n]) {
      %zero: f32[n] = full() {value = 0.0, dtype = f32, shape = [n]}
      %y: f32[n] = sub(%x, %zero)
      return %y
    }
    """
    expect(
        opt(text, "plain"),
        """\
graph @main(%x: f32[n]) {
  return %x
}
""",
    )


def test_find() -> None:
    text = ATTENTION
    expect(
        opt(text, "find", train=("q",)),
        """\
graph @main(%q: f32[n, 2, 4], %k: f32[n, 3, 4], %v: f32[n, 3, 4]) {
  %t: f32[n, 4, 3] = transpose(%k) {perm = (0, 2, 1)}
  %s: f32[n, 2, 3] = matmul(%q, %t)
  %top: f32[n, 2, 1] = reduce(%s) {op = "max", axes = (2), keepdims = true}
  %wide: f32[n, 2, 3] = broadcast(%top) {shape = [n, 2, 3], axes = (0, 1, 2)}
  %below: f32[n, 2, 3] = sub(%s, %wide)
  %e: f32[n, 2, 3] = exp(%below)
  %sum: f32[n, 2, 1] = reduce(%e) {op = "sum", axes = (2), keepdims = true}
  %all: f32[n, 2, 3] = broadcast(%sum) {shape = [n, 2, 3], axes = (0, 1, 2)}
  %w: f32[n, 2, 3] = div(%e, %all)
  %attention: f32[n, 2, 4] = attention(%q, %k, %v) {scale = 1.0, causal = false, masked = false, swapped = false, nan_rows = true, first = <0>, zero_nan = false}
  return %attention
}
""",
    )


def test_gradient() -> None:
    text = """
    graph @main(%x: f32[n, 4], %w: f32[4, 3]) {
      %y: f32[n, 3] = matmul(%x, %w)
      %l: f32[] = reduce(%y) {op = "sum", axes = (0, 1), keepdims = false}
      return %l
    }
    """
    expect(
        opt(text, "gradient", train=("w",)),
        """\
graph @main(%x: f32[n, 4], %w: f32[4, 3]) {
  %y: f32[n, 3] = matmul(%x, %w)
  %l: f32[] = reduce(%y) {op = "sum", axes = (0, 1), keepdims = false}
  %full: f32[] = full() {value = 1.0, dtype = f32, shape = ()}
  %reshape: f32[1, 1] = reshape(%full) {shape = [1, 1]}
  %broadcast: f32[n, 3] = broadcast(%reshape) {shape = [n, 3], axes = (0, 1)}
  %transpose: f32[4, n] = transpose(%x) {perm = (1, 0)}
  %matmul: f32[4, 3] = matmul(%transpose, %broadcast)
  return %l, %matmul
}
""",
    )


def test_clean() -> None:
    text = """
    graph @main(%x: f32[n]) {
      %a: f32[n] = neg(%x)
      %b: f32[n] = neg(%a)
      return %b
    }
    """
    expect(
        opt(text, "clean", train=("x",)),
        """\
graph @main(%x: f32[n]) {
  return %x
}
""",
    )


def test_flow() -> None:
    text = """
    graph @main(%h: f32[n], %xs: f32[t, n]) {
      %last: f32[n], %all: f32[t, n] = scan(%h, %xs)
        {rounds = <t>, scanned = 1, reverse = false}
        region @body(%a: f32[n], %x: f32[n]) {
          %b: f32[n] = add(%a, %x)
          %c: f32[n] = neg(%b)
          return %b, %c
        }
      return %last, %all
    }
    """
    expect(
        opt(text, "flow"),
        """\
graph @main(%h: f32[n], %xs: f32[t, n]) {
  %last: f32[n], %all: f32[t, n], %next_last: f32[n], %memory: u8[0] = call_loop(%h, %xs) {callee = "scan_0", sizes = [n, t]}
  return %last, %all
}

inside @scan_0.body @scan_0.body.map_0(%a: f32[n], %x: f32[n]) {
  %b: f32[n] = add(%a, %x)
  %c: f32[n] = neg(%b)
  return %b, %c
}

loop @scan_0.body.map_0(n; in %in_0: f32[n], in %in_1: f32[n], out %out_0: f32[n], out %out_1: f32[n]) do
  for _p = 0 to ceildiv(n, 2048) parallel grain 16 do
    for _d0 = 2048*_p to min(2048*_p + 2048, n) vector {
      local $_v1: f32 = %in_0[_d0]
      local $_v2: f32 = %in_1[_d0]
      local $_v3: f32 = add($_v1, $_v2)
      %out_0[_d0] = $_v3
      local $_v4: f32 = neg($_v3)
      %out_1[_d0] = $_v4
    }
  end
end

loop @scan_0(n, t; in %arg_0: f32[n], in %rows_0: f32[n*t], out %last: f32[n], out %all: f32[n*t], out %next_last: f32[n], out %memory: u8[0]) {
  for _block = 0 to ceildiv(n, 2048) parallel grain 32 do
    for _i = 2048*_block to min(2048*_block + 2048, n) vector do
      %last[_i] = %arg_0[_i]
    end
  end
  {
    for _pair = 0 to t//2 {
      {
        let _row = index(2*_pair)
        call @scan_0.body.map_0(n; %last[0], %rows_0[_row*n], %next_last[0], %all[_row*n])
      }
      {
        let _row = index(2*_pair + 1)
        call @scan_0.body.map_0(n; %next_last[0], %rows_0[_row*n], %last[0], %all[_row*n])
      }
    }
    if eq(index(t % 2), index(1)) {
      {
        let _row = index(t - 1)
        call @scan_0.body.map_0(n; %last[0], %rows_0[_row*n], %next_last[0], %all[_row*n])
      }
      for _block = 0 to ceildiv(n, 2048) parallel grain 32 do
        for _i = 2048*_block to min(2048*_block + 2048, n) vector do
          %last[_i] = %next_last[_i]
        end
      end
    }
  }
}
""",
    )


def test_attention() -> None:
    text = ATTENTION
    expect(
        opt(text, "attention"),
        """\
graph @main(%q: f32[n, 2, 4], %k: f32[n, 3, 4], %v: f32[n, 3, 4]) {
  %t: f32[n, 4, 3] = transpose(%k) {perm = (0, 2, 1)}
  %s: f32[n, 2, 3] = matmul(%q, %t)
  %top: f32[n, 2, 1] = reduce(%s) {op = "max", axes = (2), keepdims = true}
  %wide: f32[n, 2, 3] = broadcast(%top) {shape = [n, 2, 3], axes = (0, 1, 2)}
  %below: f32[n, 2, 3] = sub(%s, %wide)
  %e: f32[n, 2, 3] = exp(%below)
  %sum: f32[n, 2, 1] = reduce(%e) {op = "sum", axes = (2), keepdims = true}
  %all: f32[n, 2, 3] = broadcast(%sum) {shape = [n, 2, 3], axes = (0, 1, 2)}
  %w: f32[n, 2, 3] = div(%e, %all)
  %attention: f32[n, 2, 4] = attention(%q, %k, %v) {scale = 1.0, causal = false, masked = false, swapped = false, nan_rows = true, first = <0>, zero_nan = false}
  return %attention
}
""",
    )


def test_contractions() -> None:
    text = """
    graph @main(%x: f32[n, 4], %w: f32[3, 4]) {
      %t: f32[4, 3] = transpose(%w) {perm = (1, 0)}
      %y: f32[n, 3] = matmul(%x, %t)
      return %y
    }
    """
    expect(
        opt(text, "contractions"),
        """\
graph @main(%x: f32[n, 4], %w: f32[3, 4]) {
  %t: f32[4, 3] = transpose(%w) {perm = (1, 0)}
  %y: f32[n, 3] = matmul(%x, %t)
  return %y
}
""",
    )


def test_contractions_copies_rows_of_two_strides() -> None:
    text = """
    graph @main(%x: f32[b, n, 4], %w: f32[1, 4, 3]) {
      %t: f32[n, b, 4] = transpose(%x) {perm = (1, 0, 2)}
      %y: f32[n, b, 3] = matmul(%t, %w)
      return %y
    }
    """
    expect(
        opt(text, "contractions"),
        """\
graph @main(%x: f32[b, n, 4], %w: f32[1, 4, 3]) {
  %t: f32[n, b, 4] = transpose(%x) {perm = (1, 0, 2)}
  %reshape: f32[b*n, 4] = reshape(%t) {shape = [b*n, 4]}
  %reshape_1: f32[4, 3] = reshape(%w) {shape = [4, 3]}
  %matmul: f32[b*n, 3] = matmul(%reshape, %reshape_1)
  %reshape_2: f32[n, b, 3] = reshape(%matmul) {shape = [n, b, 3]}
  return %reshape_2
}
""",
    )


def test_overwrite() -> None:
    text = """
    graph @main(%x: f32[2, n], %c: f32[2, 9*n]) {
      %a: f32[2, n] = slice(%c) {starts = [0, 0], shape = [2, n], steps = (1, 1)}
      %b: f32[2, 7*n] = slice(%c) {starts = [0, 2*n], shape = [2, 7*n], steps = (1, 1)}
      %new: f32[2, 9*n] = concat(%a, %x, %b) {axis = 1}
      return %new
    }
    """
    expect(
        opt(text, "overwrite", stores=(("c", 0),)),
        """\
graph @main(%x: f32[2, n], %c: f32[2, 9*n]) {
  %a: f32[2, n] = slice(%c) {starts = [0, 0], shape = [2, n], steps = (1, 1)}
  %b: f32[2, 7*n] = slice(%c) {starts = [0, 2*n], shape = [2, 7*n], steps = (1, 1)}
  %new: f32[2, 9*n] = concat(%a, %x, %b) {axis = 1}
  %overwrite: f32[2, 9*n] = overwrite(%c, %x) {starts = [0, n]}
  return %overwrite
}
""",
    )


def test_simplify() -> None:
    text = """
    graph @main(%x: f32[n, 1]) {
      %a: f32[n] = reshape(%x) {shape = [n]}
      %b: f32[n, 1] = reshape(%a) {shape = [n, 1]}
      return %b
    }
    """
    expect(
        opt(text, "simplify"),
        """\
graph @main(%x: f32[n, 1]) {
  return %x
}
""",
    )


def test_absorb() -> None:
    text = """
    graph @main(%x: f32[n, 2]) {
      %w: f32[2, 2] = constant() {name = "w"}
      %s: f32[2] = constant() {name = "s"}
      %y: f32[n, 2] = matmul(%x, %w)
      %t: f32[n, 2] = broadcast(%s) {shape = [n, 2], axes = (1)}
      %z: f32[n, 2] = mul(%y, %t)
      return %z
    }
    constant @w: f32[2, 2] dense [1.0, 2.0, 3.0, 4.0]
    constant @s: f32[2] dense [2.0, 0.5]
    """
    expect(
        opt(text, "absorb"),
        """\
graph @main(%x: f32[n, 2]) {
  %w: f32[2, 2] = constant() {name = "w"}
  %s: f32[2] = constant() {name = "s"}
  %t: f32[n, 2] = broadcast(%s) {shape = [n, 2], axes = (1)}
  %broadcast: f32[2, 2] = broadcast(%s) {shape = [2, 2], axes = (1)}
  %mul: f32[2, 2] = mul(%w, %broadcast)
  %matmul: f32[n, 2] = matmul(%x, %mul)
  return %matmul
}

constant @w: f32[2, 2] dense [1.0, 2.0, 3.0, 4.0]
constant @s: f32[2] dense [2.0, 0.5]
""",
    )


def test_coded() -> None:
    text = """
    graph @main(%x: f32[n, 4]) {
      %c: u8[2, 4] = constant() {name = "c"}
      %s: f32[2] = constant() {name = "s"}
      %q: f32[2, 4] = cast(%c) {dtype = f32}
      %t: f32[2, 4] = broadcast(%s) {shape = [2, 4], axes = (0)}
      %w: f32[2, 4] = mul(%q, %t)
      %wt: f32[4, 2] = transpose(%w) {perm = (1, 0)}
      %y: f32[n, 2] = matmul(%x, %wt)
      return %y
    }
    constant @c: u8[2, 4] dense [1, 2, 3, 4, 5, 6, 7, 255]
    constant @s: f32[2] dense [2.0, 0.5]
    """
    expect(
        opt(text, "coded"),
        """\
graph @main(%x: f32[n, 4]) {
  %c: u8[2, 4] = constant() {name = "c"}
  %s: f32[2] = constant() {name = "s"}
  %reshape: f32[2, 1] = reshape(%s) {shape = [2, 1]}
  %coded_matmul: f32[n, 2] = coded_matmul(%x, %c, %reshape) {bits = 8, low = 0, zero = 0.0}
  return %coded_matmul
}

constant @c: u8[2, 4] dense [1, 2, 3, 4, 5, 6, 7, 255]
constant @s: f32[2] dense [2.0, 0.5]
""",
    )


def test_merge() -> None:
    text = """
    graph @main(%x: f32[n, 2]) {
      %a: f32[2, 2] = constant() {name = "a"}
      %b: f32[2, 2] = constant() {name = "b"}
      %y: f32[n, 2] = matmul(%x, %a)
      %z: f32[n, 2] = matmul(%x, %b)
      return %y, %z
    }
    constant @a: f32[2, 2] dense [1.0, 2.0, 3.0, 4.0]
    constant @b: f32[2, 2] dense [5.0, 6.0, 7.0, 8.0]
    """
    expect(
        opt(text, "merge"),
        """\
graph @main(%x: f32[n, 2]) {
  %a: f32[2, 2] = constant() {name = "a"}
  %b: f32[2, 2] = constant() {name = "b"}
  %y: f32[n, 2] = matmul(%x, %a)
  %z: f32[n, 2] = matmul(%x, %b)
  return %y, %z
}

constant @a: f32[2, 2] dense [1.0, 2.0, 3.0, 4.0]
constant @b: f32[2, 2] dense [5.0, 6.0, 7.0, 8.0]
""",
    )


def test_layout() -> None:
    text = """
    graph @main(%x: f32[n, 160, 8, 8], %w: f32[160, 160, 3, 3]) {
      %y: f32[n, 160, 8, 8] = conv(%x, %w) {stride = (1, 1), low = (1, 1), high = (1, 1), dilation = (1, 1), groups = 1}
      %z: f32[n, 160, 8, 8] = conv(%y, %w) {stride = (1, 1), low = (1, 1), high = (1, 1), dilation = (1, 1), groups = 1}
      return %z
    }
    """
    expect(
        opt(text, "layout", sizes=(0, 1, 3)),
        """\
graph @main(%x: f32[n, 160, 8, 8], %w: f32[160, 160, 3, 3]) {
  %transpose: f32[n, 8, 8, 160] = transpose(%x) {perm = (0, 2, 3, 1)}
  %conv_last: f32[n, 8, 8, 160] = conv_last(%transpose, %w) {stride = (1, 1), low = (1, 1), high = (1, 1), dilation = (1, 1)}
  %conv_last_1: f32[n, 8, 8, 160] = conv_last(%conv_last, %w) {stride = (1, 1), low = (1, 1), high = (1, 1), dilation = (1, 1)}
  %transpose_1: f32[n, 160, 8, 8] = transpose(%conv_last_1) {perm = (0, 3, 1, 2)}
  return %transpose_1
}
""",
    )


def test_native() -> None:
    text = """
    graph @main(%x: f32[n]) {
      %y: f32[n] = neg(%x)
      return %y
    }
    """
    expect(
        opt(text, "native"),
        """\
graph @main(%x: f32[n]) {
  %y: f32[n] = neg(%x)
  return %y
}
""",
    )


def test_fold() -> None:
    text = """
    graph @main(%x: f32[n, 2]) {
      %w: f32[2] = constant() {name = "w"}
      %v: f32[2] = exp(%w)
      %t: f32[n, 2] = broadcast(%v) {shape = [n, 2], axes = (1)}
      %y: f32[n, 2] = add(%x, %t)
      return %y
    }
    constant @w: f32[2] dense [0.0, 1.0]
    """
    expect(
        opt(text, "fold"),
        """\
graph @main(%x: f32[n, 2]) {
  %v: f32[2] = constant() {name = "v.folded"}
  %t: f32[n, 2] = broadcast(%v) {shape = [n, 2], axes = (1)}
  %y: f32[n, 2] = add(%x, %t)
  return %y
}

constant @v.folded: f32[2] dense [1.0, 2.7182819843292236]
""",
    )


def test_quotients() -> None:
    text = """
    graph @main(%x: f32[n, 4]) {
      %top: f32[n, 1] = reduce(%x) {op = "max", axes = (1), keepdims = true}
      %wide: f32[n, 4] = broadcast(%top) {shape = [n, 4], axes = (0, 1)}
      %below: f32[n, 4] = sub(%x, %wide)
      %e: f32[n, 4] = exp(%below)
      %sum: f32[n, 1] = reduce(%e) {op = "sum", axes = (1), keepdims = true}
      %all: f32[n, 4] = broadcast(%sum) {shape = [n, 4], axes = (0, 1)}
      %y: f32[n, 4] = div(%e, %all)
      return %y
    }
    """
    expect(
        opt(text, "quotients"),
        """\
graph @main(%x: f32[n, 4]) {
  %top: f32[n, 1] = reduce(%x) {op = "max", axes = (1), keepdims = true}
  %wide: f32[n, 4] = broadcast(%top) {shape = [n, 4], axes = (0, 1)}
  %below: f32[n, 4] = sub(%x, %wide)
  %e: f32[n, 4] = exp(%below)
  %sum: f32[n, 1] = reduce(%e) {op = "sum", axes = (1), keepdims = true}
  %all: f32[n, 4] = broadcast(%sum) {shape = [n, 4], axes = (0, 1)}
  %reciprocal: f32[n, 1] = reciprocal(%sum)
  %broadcast: f32[n, 4] = broadcast(%reciprocal) {shape = [n, 4], axes = (0, 1)}
  %mul: f32[n, 4] = mul(%e, %broadcast)
  return %mul
}
""",
    )


def test_rounding() -> None:
    text = """
    graph @main(%a: bf16[n, 4], %b: bf16[n, 4]) {
      %y: bf16[n, 4] = mul(%a, %b)
      %top: bf16[n, 1] = reduce(%y) {op = "max", axes = (1), keepdims = true}
      %wide: bf16[n, 4] = broadcast(%top) {shape = [n, 4], axes = (0, 1)}
      %z: bf16[n, 4] = sub(%y, %wide)
      %e: bool[n, 4] = eq(%y, %wide)
      return %z, %e
    }
    """
    expect(
        opt(text, "rounding"),
        """\
graph @main(%a: bf16[n, 4], %b: bf16[n, 4]) {
  %y: bf16[n, 4] = mul(%a, %b)
  %y_rounded: bf16[n, 4] = rounded(%y)
  %top: bf16[n, 1] = reduce(%y_rounded) {op = "max", axes = (1), keepdims = true}
  %wide: bf16[n, 4] = broadcast(%top) {shape = [n, 4], axes = (0, 1)}
  %z: bf16[n, 4] = sub(%y_rounded, %wide)
  %e: bool[n, 4] = eq(%y_rounded, %wide)
  return %z, %e
}
""",
    )


def test_recompute() -> None:
    text = """
    graph @main(%x: f32[n, 4], %w: f32[4, 4]) {
      %h: f32[n, 4] = matmul(%x, %w)
      %a: f32[n, 4] = tanh(%h)
      %l: f32[] = reduce(%a) {op = "sum", axes = (0, 1), keepdims = false}
      %s: f32[n, 4] = mul(%a, %a)
      return %l, %s
    }
    """
    expect(
        opt(text, "recompute", train=("x",)),
        """\
graph @main(%x: f32[n, 4], %w: f32[4, 4]) {
  %h: f32[n, 4] = matmul(%x, %w)
  %a: f32[n, 4] = tanh(%h)
  %l: f32[] = reduce(%a) {op = "sum", axes = (0, 1), keepdims = false}
  %s: f32[n, 4] = mul(%a, %a)
  return %l, %s
}
""",
    )


def test_chunk() -> None:
    text = """
    graph @main(%x: f32[n, 4], %w: f32[4, 64], %v: f32[64, 4]) {
      %a: f32[n, 4] = tanh(%x)
      %h: f32[n, 64] = matmul(%a, %w)
      %y: f32[n, 4] = matmul(%h, %v)
      %z: f32[n, 4] = reshape(%y) {shape = [n, 4]}
      return %z
    }
    """
    expect(
        opt(text, "fuse,chunk"),
        """\
graph @main(%x: f32[n, 4], %w: f32[4, 64], %v: f32[64, 4]) {
  %a: f32[n, 4] = fusion(%x) {kind = "map"}
    region @region(%x: f32[n, 4]) {
      %a: f32[n, 4] = tanh(%x)
      return %a
    }
  %h: f32[n, 64] = fusion(%a, %w) {kind = "matmul"}
    region @region_1(%a: f32[n, 4], %w: f32[4, 64]) {
      %h: f32[n, 64] = matmul(%a, %w)
      return %h
    }
  %y: f32[n, 4] = fusion(%h, %v) {kind = "matmul"}
    region @region_2(%h: f32[n, 64], %v: f32[64, 4]) {
      %y: f32[n, 4] = matmul(%h, %v)
      return %y
    }
  %z: f32[n, 4] = reshape(%y) {shape = [n, 4]}
  return %z
}

graph @main.1(%x: f32[n, 4], %w: f32[4, 64], %v: f32[64, 4]) sizes (rows_0) {
  %y: f32[n, 4] = chunk(%x, %w, %v) {extent = <n>, rows = <rows_0>, outers = [1, 0, 0, 1]}
    region @chunk(%x: f32[chunk_rows, 4], %w: f32[4, 64], %v: f32[64, 4]) sizes (chunk_rows, chunk_first) {
      constraint 1 <= chunk_rows
      constraint chunk_rows <= n
      constraint 0 <= chunk_first
      constraint chunk_first + chunk_rows <= n
      %a: f32[chunk_rows, 4] = tanh(%x)
      %h: f32[chunk_rows, 64] = matmul(%a, %w)
      %y: f32[chunk_rows, 4] = matmul(%h, %v)
      return %y
    }
  %z: f32[n, 4] = reshape(%y) {shape = [n, 4]}
  return %z
}

knob rows_0 of n by 18
""",
    )


def test_chunk_loops() -> None:
    text = """
    graph @main(%x: f32[n, 4]) {
      %y: f32[n, 4] = fusion(%x) {kind = "map"}
        region @region(%x: f32[n, 4]) {
          %y: f32[n, 4] = tanh(%x)
          return %y
        }
      return %y
    }
    graph @main.1(%x: f32[n, 4]) sizes (rows_n) {
      %y: f32[n, 4] = chunk(%x) {extent = <n>, rows = <rows_n>, outers = [1, 1]}
        region @chunk(%x: f32[chunk_rows, 4]) sizes (chunk_rows, chunk_first) {
          constraint chunk_rows <= n
          %y: f32[chunk_rows, 4] = tanh(%x)
          return %y
        }
      return %y
    }
    knob rows_n of n by 1
    """
    expect(
        opt(text, "chunk_loops"),
        """\
graph @main(%x: f32[n, 4]) {
  %y: f32[n, 4] = fusion(%x) {kind = "map"}
    region @region(%x: f32[n, 4]) {
      %y: f32[n, 4] = tanh(%x)
      return %y
    }
  return %y
}

graph @main.1(%x: f32[n, 4]) sizes (rows_n) {
  %y: f32[n, 4], %memory: u8[0], %result_0: f32[4*rows_n] = fusion(%x) {kind = "call_loop"}
    region @chunk_0(%x: f32[n, 4]) {
      %y: f32[n, 4], %memory: u8[0], %result_0: f32[4*rows_n] = call_loop(%x) {callee = "chunk_0", sizes = [n, rows_n]}
      return %y, %memory, %result_0
    }
  return %y
}

chunks @chunk_0 aligned (%arg_0 %out_0) @chunk(%x: f32[n, 4]) {
  %y: f32[n, 4] = chunk(%x) {extent = <n>, rows = <rows_n>, outers = [1, 1]}
    region @chunk(%x: f32[chunk_rows, 4]) sizes (chunk_rows, chunk_first) {
      constraint chunk_rows <= n
      %y: f32[chunk_rows, 4] = tanh(%x)
      return %y
    }
  return %y
}

loop @chunk_0.map_0(chunk_rows; in %in_0: f32[4*chunk_rows], out %out_0: f32[4*chunk_rows]) do
  for _p = 0 to ceildiv(chunk_rows, 512) parallel grain 2 do
    for _d1 = 2048*_p to min(2048*_p + 2048, 4*chunk_rows) vector {
      local $_v1: f32 = %in_0[_d1]
      local $_v2: f32 = tanh($_v1)
      %out_0[_d1] = $_v2
    }
  end
end

loop @chunk_0.rows_0(_count; in %rows: f32[_count], out %whole: f32[_count]) do
  for _block = 0 to ceildiv(_count, 2048) parallel grain 32 do
    for _i = 2048*_block to min(2048*_block + 2048, _count) vector do
      %whole[_i] = %rows[_i]
    end
  end
end

loop @chunk_0(n, rows_n; in %arg_0: f32[4*n], out %out_0: f32[4*n], out %memory: u8[0], out %result_0: f32[4*rows_n]) {
  for _chunk = 0 to ceildiv(n, rows_n) {
    let chunk_first = index(_chunk*rows_n)
    let chunk_rows = index(min(-chunk_first + n, rows_n))
    call @chunk_0.map_0(chunk_rows; %arg_0[4*chunk_first], %result_0[0])
    call @chunk_0.rows_0(4*chunk_rows; %result_0[0], %out_0[4*chunk_first])
  }
}

knob rows_n of n by 1
""",
    )


def test_fuse() -> None:
    text = """
    graph @main(%x: f32[n, 4], %w: f32[4, 4]) {
      %h: f32[n, 4] = matmul(%x, %w)
      %a: f32[n, 4] = tanh(%h)
      %y: f32[n, 4] = neg(%a)
      return %y
    }
    """
    expect(
        opt(text, "fuse"),
        """\
graph @main(%x: f32[n, 4], %w: f32[4, 4]) {
  %y: f32[n, 4] = fusion(%x, %w) {kind = "matmul"}
    region @region(%x: f32[n, 4], %w: f32[4, 4]) {
      %h: f32[n, 4] = matmul(%x, %w)
      %a: f32[n, 4] = tanh(%h)
      %y: f32[n, 4] = neg(%a)
      return %y
    }
  return %y
}
""",
    )
