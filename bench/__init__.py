"""Benchmarks. With several threads every engine has its own, which spin for a while
when they have nothing to do and take cores from whoever is measured next. OpenBLAS's
do so for 2^28 ticks of the clock, a tenth of a second: here for 2^22, two milliseconds,
still far longer than calls are apart. It asks when it is loaded.
"""

import os

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "22")
