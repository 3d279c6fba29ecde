"""Compile kernels, by default the C++ kernels for the CPU (see plugins/cpu/build.py).

--sanitize compiles these with address and undefined-behaviour checks. --target tensorrt compiles the kernels of the
TensorRT plugins (see plugins/tensorrt/build.py). --target triton compiles the kernels that torch launches, to show what
they take of a GPU (see plugins/triton/compile.py).
"""

import argparse
import sys

from trtspec_plugins.cpu import build as cpu
from trtspec_plugins.tensorrt import build as tensorrt
from trtspec_plugins.triton import compile as triton

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("cpu", "tensorrt", "triton"), default="cpu")
    parser.add_argument("--sanitize", action="store_true", help="cpu: with address and undefined-behaviour checks")
    parser.add_argument(
        "--arch", nargs="+", default=[], metavar="SM", help=f"tensorrt, triton: {' '.join(triton.ARCHITECTURES)}"
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=[],
        metavar="NAME",
        help="tensorrt: SpecAccept, SpecAttention-bf16-d64-g3, ...; triton: spec_accept, ...",
    )
    arguments = parser.parse_args()
    if arguments.target != "cpu":
        if arguments.sanitize:
            parser.error("--sanitize is for --target cpu")
        main = tensorrt.main if arguments.target == "tensorrt" else triton.main
        sys.exit(main(arguments.arch, arguments.kernels))
    if arguments.arch or arguments.kernels:
        parser.error("--arch and --kernels are for the other targets; of the CPU's kernels all are built")
    sys.exit(cpu.main())
