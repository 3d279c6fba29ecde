"""`python -m trtspec` is the `trtspec` command."""

import sys

from trtspec.cli import main

sys.exit(main())
