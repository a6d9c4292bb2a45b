"""Checks a wheel: installed in a clean venv, with NumPy and nothing else, it runs a
saved model, where neither a compiler nor torch nor LLVM can be found.

    python -m demo.check_wheel dist/pliant-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl

The model is saved by the pliant that runs this file, which has the compiler.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import numpy as np

import pliant
from pliant.ir.parse import parse_module
from pliant.machine import target

MODEL = """
graph @main(%x: f32[n, 8]) {
  %y: f32[n, 8] = softmax(%x) {axis = 1}
  return %y
}
"""
SCRIPT = """
import importlib.util, sys
import numpy as np, pliant
for name in ("torch", "llvmlite", "tvm_ffi", "onnx", "safetensors", "rich"):
    assert importlib.util.find_spec(name) is None, name
model = pliant.load(sys.argv[1])
for n in (1, 5, 300):
    x = np.random.default_rng(n).standard_normal((n, 8)).astype(np.float32)
    wide = np.exp(x.astype(np.float64))
    wanted = wide / wide.sum(1, keepdims=True)
    np.testing.assert_allclose(model(x), wanted, rtol=1e-5)
print(pliant.__version__, pliant.__file__, model.memory_plan(n=7).peak_bytes)
"""


def main(wheel: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        saved = place / "m.pliant"
        plain = target.named("baseline")
        pliant.compile(parse_module(MODEL), target=plain).save(saved)
        venv.create(place / "venv", with_pip=True)
        python = str(place / "venv" / "bin" / "python")
        install = [python, "-m", "pip", "install", "-q", "--only-binary", ":all:"]
        bare = {"PATH": "", "HOME": folder}  # no cc, and nothing else
        run(*install, f"numpy=={np.__version__}")
        run(*install, "--no-deps", str(wheel))
        print(run(python, "-I", "-c", SCRIPT, str(saved), env=bare), end="")
        ran = run(
            *(python, "-I", "-m", "pliant", "run", str(saved), "--dims", "n=3"),
            env=bare,
        )
        print(ran, end="")
    return 0


def run(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    return done.stdout


if __name__ == "__main__":
    (given,) = sys.argv[1:]
    sys.exit(main(Path(given).absolute()))
