"""`python -m badam_kernels`."""

import sys

from .cli import main

sys.exit(main())
