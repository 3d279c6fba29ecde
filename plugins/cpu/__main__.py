"""Command line of `python -m trtspec_plugins.cpu`, which builds the kernels where they are installed."""

import sys

from trtspec_plugins.cpu.build import main

sys.exit(main())
