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
    parser.add_argument(
        "--kernels", nargs="+", default=[], metavar="NAME", help="tensorrt: SpecAccept, SpecAttention-bf16-d64-g3, ..."
    )
    arguments = parser.parse_args()
    if arguments.target == "tensorrt":
        if arguments.sanitize:
            parser.error("--sanitize is for --target cpu")
        sys.exit(tensorrt.main(arguments.arch, arguments.kernels))
    if arguments.arch or arguments.kernels:
        parser.error("--arch and --kernels are for --target tensorrt; of the CPU's kernels all are built")
    sys.exit(cpu.main())
