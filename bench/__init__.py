"""Benchmarks.

With several threads every engine has its own, which spin for a while when idle and take
cores from the engine that is measured next. OpenBLAS's threads spin for 2^28 clock
ticks, a tenth of a second. Here it is 2^22 ticks, two milliseconds, which is still far
longer than the time between calls. OpenBLAS reads the setting when it is loaded.
"""

import os

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "22")
