"""`python -m pliant` is `pliant`."""

import sys

from pliant.cli import main

sys.exit(main())
