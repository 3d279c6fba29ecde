"""Compile the C++ kernels (see plugins/cpu/build.py). --sanitize: with address and undefined-behaviour checks."""

import sys

from trtspec_plugins.cpu.build import main

if __name__ == "__main__":
    sys.exit(main())
