"""Compile kernels: by default the C++ ones for the CPU (see plugins/cpu/build.py; --sanitize: with address and
undefined-behaviour checks), with --target tensorrt those of the TensorRT plugins (see plugins/tensorrt/build.py)."""

import argparse
import sys

from trtspec_plugins.cpu import build as cpu
from trtspec_plugins.tensorrt import build as tensorrt

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("cpu", "tensorrt"), default="cpu")
    parser.add_argument("--sanitize", action="store_true", help="cpu: with address and undefined-behaviour checks")
    parser.add_argument(
        "--arch", nargs="+", default=[], metavar="SM", help=f"tensorrt: {' '.join(tensorrt.ARCHITECTURES)}"
    )
    arguments = parser.parse_args()
    if arguments.target == "tensorrt":
        if arguments.sanitize:
            parser.error("--sanitize is for --target cpu")
        sys.exit(tensorrt.main(arguments.arch))
    if arguments.arch:
        parser.error("--arch is for --target tensorrt; the CPU's kernels are built for every instruction set")
    sys.exit(cpu.main())
