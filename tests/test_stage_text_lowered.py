"""The stages from `lower` on, on a small text: what goes in, what comes out."""

from __future__ import annotations

from stage_text import expect, opt

SUBTRACT = """
loop @f(n; in %p: f32[n], in %g: f32[n], out %o: f32[n]) do
  for i = 0 to n vector {
    local $v: f32 = %p[i]
    %o[i] = sub($v, %g[i])
  }
end
"""


def test_lower() -> None:
    text = """
    graph @main(%x: f32[n]) {
      %y: f32[n] = fusion(%x) {kind = "map"} region @map(%a: f32[n]) {
        %b: f32[n] = exp(%a)
        return %b
      }
      return %y
    }
    """
    expect(
        opt(text, "lower"),
        """\
graph @main(%x: f32[n]) {
  %y_1: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %y_1) {callee = "map_0", sizes = [n], computes = "map_0"}
  return %y_1
}

graph @map_0(%a: f32[n]) {
  %b: f32[n] = exp(%a)
  return %b
}

loop @map_0(n; in %in_0: f32[n], out %out_0: f32[n]) do
  for _p = 0 to ceildiv(n, 2048) parallel grain 4 do
    for _d0 = 2048*_p to min(2048*_p + 2048, n) vector {
      local $_v1: f32 = %in_0[_d0]
      local $_v2: f32 = exp($_v1)
      %out_0[_d0] = $_v2
    }
  end
end
""",
    )


def test_update() -> None:
    text = (
        """
graph @main(%p: f32[n], %g: f32[n]) {
  %loss: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  %new: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%p, %g, %new) {callee = "f", sizes = [n]}
  call_loop(%p, %g, %loss) {callee = "f", sizes = [n]}
  return %loss, %new
}
"""
        + SUBTRACT
    )
    expect(
        opt(text, "update", update=("p",)),
        """\
graph @main(%p: f32[n], %g: f32[n]) {
  %loss: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  %new: f32[n] = view(%p) {offset = <0>}
  call_loop(%p, %g, %loss) {callee = "f", sizes = [n]}
  call_loop(%p, %g, %new) {callee = "f_in_place", sizes = [n]}
  return %loss
}

loop @f(n; in %p: f32[n], in %g: f32[n], out %o: f32[n]) do
  for i = 0 to n vector {
    local $v: f32 = %p[i]
    %o[i] = sub($v, %g[i])
  }
end

loop @f_in_place(n; in %p: f32[n], in %g: f32[n], inout %o: f32[n]) do
  for i = 0 to n vector {
    local $v: f32 = %p[i]
    %o[i] = sub($v, %g[i])
  }
end
""",
    )


def test_order() -> None:
    text = (
        """
graph @main(%x: f32[n]) {
  %a: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %x, %a) {callee = "f", sizes = [n]}
  %b: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %x, %b) {callee = "f", sizes = [n]}
  %c: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%a, %x, %c) {callee = "f", sizes = [n]}
  %d: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%c, %x, %d) {callee = "f", sizes = [n]}
  %e: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%b, %d, %e) {callee = "f", sizes = [n]}
  return %e
}
"""
        + SUBTRACT
    )
    expect(
        opt(text, "order"),
        """\
graph @main(%x: f32[n]) {
  %a: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %x, %a) {callee = "f", sizes = [n]}
  %c: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%a, %x, %c) {callee = "f", sizes = [n]}
  %d: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%c, %x, %d) {callee = "f", sizes = [n]}
  %b: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %x, %b) {callee = "f", sizes = [n]}
  %e: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%b, %d, %e) {callee = "f", sizes = [n]}
  return %e
}

loop @f(n; in %p: f32[n], in %g: f32[n], out %o: f32[n]) do
  for i = 0 to n vector {
    local $v: f32 = %p[i]
    %o[i] = sub($v, %g[i])
  }
end
""",
    )


def test_inplace() -> None:
    text = (
        """
graph @main(%x: f32[n]) {
  %a: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %x, %a) {callee = "f", sizes = [n]}
  %b: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%a, %x, %b) {callee = "f", sizes = [n]}
  %c: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%b, %x, %c) {callee = "f", sizes = [n]}
  return %c
}
"""
        + SUBTRACT
    )
    expect(
        opt(text, "inplace"),
        """\
graph @main(%x: f32[n]) {
  %a: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %x, %a) {callee = "f", sizes = [n]}
  %b: f32[n] = view(%a) {offset = <0>}
  call_loop(%x, %a) {callee = "f_over_0_2", sizes = [n]}
  %c: f32[n] = view(%a) {offset = <0>}
  call_loop(%x, %b) {callee = "f_over_0_2", sizes = [n]}
  return %c
}

loop @f(n; in %p: f32[n], in %g: f32[n], out %o: f32[n]) do
  for i = 0 to n vector {
    local $v: f32 = %p[i]
    %o[i] = sub($v, %g[i])
  }
end

loop @f_over_0_2(n; in %g: f32[n], inout %o: f32[n]) do
  for i = 0 to n vector {
    local $v: f32 = %o[i]
    %o[i] = sub($v, %g[i])
  }
end
""",
    )


def test_vectorize() -> None:
    text = (
        """
graph @main(%x: f32[n]) {
  %a: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %x, %a) {callee = "f", sizes = [n]}
  return %a
}
"""
        + SUBTRACT
    )
    expect(
        opt(text, "vectorize"),
        """\
graph @main(%x: f32[n]) {
  %a: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %x, %a) {callee = "f", sizes = [n]}
  return %a
}

loop @f(n; in %p: f32[n], in %g: f32[n], out %o: f32[n]) do
  for i = 0 to n vector lanes 8 masked {
    local $v: f32 = %p[i]
    %o[i] = sub($v, %g[i])
  }
end
""",
    )


def test_unify() -> None:
    """Bounds of vector loops, divisors, 0 and 1 stay; equal numbers are one size."""
    text = """
graph @main(%x: f32[n], %y: f32[n]) {
  %a: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  %b: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %a) {callee = "f", sizes = [n]}
  call_loop(%y, %b) {callee = "g", sizes = [n]}
  return %a, %b
}

loop @copy(n; in %p: f32[n], out %o: f32[n]) do
  for i = 0 to n vector lanes 8 masked do
    %o[i] = %p[i]
  end
end

loop @f(n; in %p: f32[n], out %o: f32[n]) do
  for u = 0 to ceildiv(n, 96) do
    call @copy(min(-96*u + n, 96); %p[96*u], %o[96*u])
  end
end

loop @g(n; in %p: f32[n], out %o: f32[n]) do
  for u = 0 to ceildiv(n, 32) do
    call @copy(min(-32*u + n, 32); %p[32*u], %o[32*u])
  end
end
"""
    expect(
        opt(text, "unify"),
        """\
graph @main(%x: f32[n], %y: f32[n]) {
  %a: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  %b: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %a) {callee = "f", sizes = [n, ceildiv(n, 96), 96]}
  call_loop(%y, %b) {callee = "f", sizes = [n, ceildiv(n, 32), 32]}
  return %a, %b
}

loop @copy(n; in %p: f32[n], out %o: f32[n]) do
  for i = 0 to n vector lanes 8 masked do
    %o[i] = %p[i]
  end
end

loop @f(n, _size0, _size1; in %p: f32[n], out %o: f32[n]) do
  for u = 0 to _size0 do
    call @copy(min(-_size1*u + n, _size1); %p[_size1*u], %o[_size1*u])
  end
end
""",
    )


def test_unify_resolutions() -> None:
    """What is computed from a model's sizes is a parameter, also of callers.

    The order of `min`'s arguments depends on their names, the form does not.
    """
    text = """
graph @main(%x: f32[a, b], %y: f32[a, b]) {
  %p: f32[a*b] = alloc() {bytes = <4*a*b>, shape = [a*b], dtype = f32}
  %q: f32[b] = alloc() {bytes = <4*b>, shape = [b], dtype = f32}
  call_loop(%x, %p) {callee = "outer_f", sizes = [a, b, threads]}
  call_loop(%y, %q) {callee = "outer_g", sizes = [a, b, threads]}
  return %p, %q
}

loop @copy(n; in %p: f32[n], out %o: f32[n]) do
  for i = 0 to n vector lanes 8 masked do
    %o[i] = %p[i]
  end
end

loop @f(a, b, _rows; in %p: f32[a*b], out %o: f32[a*b]) do
  for u = 0 to ceildiv(a*b, max(_rows, 1)) do
    call @copy(max(min(_rows, a*b - _rows*u), 0); %p[_rows*u], %o[_rows*u])
  end
end

loop @g(b, _rows; in %p: f32[b], out %o: f32[b]) do
  for u = 0 to ceildiv(b, max(_rows, 1)) do
    call @copy(max(min(_rows, b - _rows*u), 0); %p[_rows*u], %o[_rows*u])
  end
end

loop @outer_f(a, b, threads; in %p: f32[a, b], out %o: f32[a*b]) do
  call @f(a, b, ceildiv(a*b, threads); %p[0, 0], %o[0])
end

loop @outer_g(a, b, threads; in %p: f32[a, b], out %o: f32[b]) do
  call @g(b, ceildiv(b, threads); %p[0, 0], %o[0])
end
"""
    expect(
        opt(text, "unify"),
        """\
graph @main(%x: f32[a, b], %y: f32[a, b]) {
  %p: f32[a*b] = alloc() {bytes = <4*a*b>, shape = [a*b], dtype = f32}
  %q: f32[b] = alloc() {bytes = <4*b>, shape = [b], dtype = f32}
  call_loop(%x, %p) {callee = "outer_f", sizes = [a, b, threads, a*b]}
  call_loop(%y, %q) {callee = "outer_f", sizes = [a, b, threads, b]}
  return %p, %q
}

loop @copy(n; in %p: f32[n], out %o: f32[n]) do
  for i = 0 to n vector lanes 8 masked do
    %o[i] = %p[i]
  end
end

loop @f(_rows, _size0; in %p: f32[_size0], out %o: f32[_size0]) do
  for u = 0 to ceildiv(_size0, max(_rows, 1)) do
    call @copy(max(min(-_rows*u + _size0, _rows), 0); %p[_rows*u], %o[_rows*u])
  end
end

loop @outer_f(a, b, threads, _size0; in %p: f32[a, b], out %o: f32[_size0]) do
  call @f(ceildiv(_size0, threads), _size0; %p[0, 0], %o[0])
end
""",
    )
