"""Rules of imports and files: imports inside trtspec go from later layers to earlier ones, and files stay short.

docs/architecture.md describes the layers.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import trtspec

ROOT = Path(trtspec.__file__).parent

# Parts of one layer do not import each other.
LAYERS = [
    {"errors"},
    {"modes", "sampling_params", "outputs", "plotting"},
    {"core"},
    {"carry"},
    {"protocols"},
    {"gguf"},
    {"hub"},
    {"config", "text"},
    {"ops"},
    {"models"},
    {"kv"},
    {"verify"},
    {"methods"},
    {"interop"},
    {"backends"},
    {"engine"},
    {"build"},
    {"progress"},
    {"llm"},
    {"bench"},
    {"serve"},
    {"cli"},
]
RANK = {name: rank for rank, group in enumerate(LAYERS) for name in group}
TRAIN_MAY_IMPORT = {*LAYERS[0], *LAYERS[1], "config", "text", "ops", "models", "methods", "llm"}


@functools.cache
def imports_of(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a file."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports() -> list[tuple[str, str, str]]:
    """Return (file, its part of the package, imported part) for every import of trtspec by trtspec."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        relative = file.relative_to(ROOT)
        own = relative.parts[0].removesuffix(".py")
        if own == "methods" and file.name == "train.py":  # the part of a method that adds to training
            own = "train"
        if own in ("__init__", "__main__"):
            continue
        for node in imports_of(file):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{relative}: relative import; write it in full"
                names = [
                    f"{node.module}.{alias.name}" if node.module == "trtspec" else str(node.module)
                    for alias in node.names
                ]
            found += [(str(relative), own, name.split(".")[1]) for name in names if name.startswith("trtspec.")]
    return found


def test_imports_follow_the_layers() -> None:
    edges = imports()
    assert len(edges) > 50
    wrong = []
    for file, own, other in edges:
        if own == other:
            continue
        allowed = other in TRAIN_MAY_IMPORT if own == "train" else other in RANK and RANK.get(other) < RANK[own]
        if other == "train":
            allowed = own == "cli"
        if not allowed:
            wrong.append(f"{file} imports {other}")
    assert not wrong


def module_imports(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Map each module to the modules of trtspec that it imports, also in functions and for the type checker.

    A name out of a package is the module of that name, or the package itself.
    """
    found: dict[str, set[str]] = {}
    for module, file in modules.items():
        names = set()
        for node in imports_of(file):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                names |= {path if path in modules else node.module for path in whole.values()}
        found[module] = names & modules.keys()
    return found


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield circles of imports, each without the edge that closes one found before.

    Yield none if imports go one way.
    """
    graph = {module: set(others) for module, others in graph.items()}
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return
        except CycleError as error:
            circle = error.args[1]  # each is imported by the next
            graph[circle[1]].discard(circle[0])
            yield circle


def modules_of_the_package() -> dict[str, Path]:
    """Map the dotted name of each module to its file."""
    files = {".".join(file.relative_to(ROOT.parent).with_suffix("").parts): file for file in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in files.items()}


def test_no_module_imports_in_a_circle() -> None:
    wrong = [*circles(module_imports(modules_of_the_package()))]
    assert not wrong, "\n".join(" <- ".join(circle) for circle in wrong)


def test_circles_are_found(tmp_path: Path) -> None:
    """Circles are found through imports in functions and for the type checker, too."""
    texts = {
        "trtspec.a": "def f():\n    from trtspec.b import c",
        "trtspec.b": "if TYPE_CHECKING:\n    from trtspec import a, d",
        "trtspec.d": "import trtspec.d.e",
        "trtspec.d.e": "import trtspec.b as b",
        "trtspec.f": "from trtspec.a import f",
    }
    modules = {name: tmp_path / name for name in texts}
    for name, text in texts.items():
        modules[name].write_text(text)
    found = [{*circle} for circle in circles(module_imports(modules))]
    assert {"trtspec.a", "trtspec.b"} in found
    assert {"trtspec.b", "trtspec.d", "trtspec.d.e"} in found
    assert len(found) == 2


def test_the_running_engine_imports_no_backend_and_nothing_that_builds() -> None:
    wrong = [(file, other) for file, own, other in imports() if own == "engine" and other in ("backends", "build")]
    assert not wrong


def test_every_part_has_a_layer() -> None:
    parts = {path.stem if path.suffix == ".py" else path.name for path in ROOT.iterdir() if path.suffix in ("", ".py")}
    assert parts - {"__init__", "__main__", "__pycache__", "train"} <= set(RANK)


def test_optional_dependencies_have_one_home() -> None:
    """Each optional dependency has one file that imports it.

    transformers is for tests only; numpy, torch and the rest of the base install may go anywhere.
    """
    homes = {"xgrammar": ROOT / "verify" / "grammar.py", "opentelemetry": ROOT / "serve" / "http" / "tracing.py"}
    for file in ROOT.rglob("*.py"):
        for node in imports_of(file):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not any(module.split(".")[0] in ("transformers", "vllm") for module in modules), file
            assert all(homes.get(module.split(".")[0], file) == file for module in modules), file


def test_every_package_is_installed() -> None:
    """pyproject.toml names each folder with an __init__.py, as plugins/ installs under another name."""
    project = ROOT.parent
    found = {".".join(file.parent.relative_to(project).parts) for file in ROOT.rglob("__init__.py")}
    plugins = project / "plugins"
    for file in plugins.rglob("__init__.py"):
        found.add(".".join(("trtspec_plugins", *file.parent.relative_to(plugins).parts)))
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"\npackages = \[(.*?)\n\]", text, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == found


def test_kernels_know_torch_and_the_ops_only() -> None:
    """The package of kernels imports nothing of trtspec but the contracts in trtspec.ops."""
    for file in (ROOT.parent / "plugins").rglob("*.py"):
        for node in imports_of(file):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            foreign = [module for module in modules if re.match(r"trtspec(\.(?!ops\b)|$)", module)]
            assert not foreign, file


def test_no_file_is_longer_than_400_lines() -> None:
    """No file of the package or of the tests is longer than 400 lines."""
    files = [file for folder in (ROOT, ROOT.parent / "tests") for file in folder.rglob("*.py")]
    assert Path(__file__) in files
    lengths = {str(file.relative_to(ROOT.parent)): file.read_bytes().count(b"\n") for file in files}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
