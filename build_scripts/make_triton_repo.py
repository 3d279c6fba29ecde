"""Write a Triton model repository: `trtspec triton-repo`, as a script."""

import sys

from trtspec.cli import main

if __name__ == "__main__":
    sys.exit(main(["triton-repo", *sys.argv[1:]]))
