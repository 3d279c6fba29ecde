"""Compile an engine folder: `trtspec build`, as a script."""

import sys

from trtspec.cli import main

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]]))
