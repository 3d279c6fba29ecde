"""Rows of compiled graphs, which the kernels' library runs one after another."""

from __future__ import annotations

import gc
import shutil
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from trtspec.backends.aoti.graph_compiler import GraphCompiler
from trtspec.backends.aoti.package import Run, load_graph, loading, unpack
from trtspec.errors import CheckpointError, EngineError
from trtspec.ops import GraphUse, Lent, load_plugins, open_row, rms_norm

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

ROWS, SIZE = 3, 32  # smaller constants become text of a graph


class Layer(nn.Module):
    """A layer that writes x into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))
        self.bias = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor, other: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache.copy_(x)
        return x - other, x * self.weight + other * self.bias


class Normed(nn.Module):
    """A module that calls a trtspec op.

    It calls the op through torch's dispatcher where it is compiled without the kernels' C functions.
    """

    def forward(self, x: Tensor, other: Tensor, cache: Tensor) -> Tensor:
        cache.copy_(x)
        return rms_norm(x, other, 1e-5)


class Chosen(nn.Module):
    """A module that fails for a row that x does not have."""

    def forward(self, x: Tensor, row: Tensor, cache: Tensor) -> Tensor:
        cache.copy_(x)
        return x[row] + 1


def compiled(module: nn.Module, example: tuple[Tensor, ...], file: Path) -> Path:
    with GraphCompiler({}) as compiler:
        compiler.add(torch.export.export(module, example, strict=False), file)
    return file


def unpacked(package: Path) -> Path:
    with zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        return Path(archive.extract(name, package.parent))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    example = (torch.zeros(ROWS, SIZE), torch.zeros(ROWS, SIZE), torch.zeros(ROWS, SIZE))
    return compiled(Layer(), example, tmp_path_factory.mktemp("graphs") / "layer.pt2")


@pytest.fixture(scope="module")
def library(package: Path) -> Path:
    return unpacked(package)


def constants(layer: Layer) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in layer.named_parameters()}


def use(library: Path, layer: Layer, cache: Tensor) -> GraphUse:
    return GraphUse(library, constants(layer).__getitem__, [cache])


def test_each_is_given_what_the_one_before_gives(library: Path) -> None:
    layers, caches = [Layer() for _ in range(4)], [torch.zeros(ROWS, SIZE) for _ in range(4)]
    row = open_row([use(library, *one) for one in zip(layers, caches, strict=True)])
    for _ in range(3):
        first, other = torch.randn(ROWS, SIZE), torch.randn(ROWS, SIZE)
        given = row([first, other])
        x, wanted = first, []
        for layer, cache in zip(layers, caches, strict=True):
            before = x
            with torch.no_grad():
                difference, x = layer(before, other, torch.empty(ROWS, SIZE))
            wanted += [difference, x]
            torch.testing.assert_close(cache, before)
        torch.testing.assert_close(given, wanted)


def test_rows_have_weights_of_their_own(library: Path) -> None:
    layers = [Layer(), Layer()]
    rows = [open_row([use(library, layer, torch.zeros(ROWS, SIZE))]) for layer in layers]
    x, other = torch.randn(ROWS, SIZE), torch.zeros(ROWS, SIZE)
    for layer, row in zip(layers, rows, strict=True):
        torch.testing.assert_close(row([x, other])[1], x * layer.weight.detach())


def test_weights_and_caches_stay_where_they_are(library: Path) -> None:
    layer, cache = Layer(), torch.zeros(ROWS, SIZE)
    row = open_row([use(library, layer, cache)])
    x, other = torch.randn(ROWS, SIZE), torch.zeros(ROWS, SIZE)
    with torch.no_grad():
        layer.weight.fill_(2)
    torch.testing.assert_close(row([x, other])[1], 2 * x)
    torch.testing.assert_close(cache, x)


def test_a_row_that_nobody_has_is_closed(library: Path) -> None:
    row = open_row([use(library, Layer(), torch.zeros(ROWS, SIZE))])
    (number,) = row.args[0]  # type: ignore[attr-defined]
    del row
    gc.collect()
    with pytest.raises(RuntimeError, match=f"run_graphs: graph {number} is not open"):
        torch.ops.trtspec_graphs.run_graphs([number], [torch.zeros(ROWS, SIZE)])


def test_what_does_not_fit_is_named(library: Path, tmp_path: Path) -> None:
    layer, cache = Layer(), torch.zeros(ROWS, SIZE)
    row = open_row([use(library, layer, cache)])
    with pytest.raises(RuntimeError, match="run_graphs: inputs are 3; want 2"):
        row([cache, cache, cache])
    with pytest.raises(RuntimeError, match="run_graphs: there are no inputs"):
        row([])
    with pytest.raises(RuntimeError, match=r"a compiled graph: .*nothing\.so"):
        open_row([use(tmp_path / "nothing.so", layer, cache)])
    with pytest.raises(RuntimeError, match="open_graph: constants are 1; want 2"):
        torch.ops.trtspec_graphs.open_graph(str(library), [cache], [cache])
    with pytest.raises(RuntimeError, match="open_graph: memory is 3 tensors, and it takes 3"):
        torch.ops.trtspec_graphs.open_graph(str(library), [layer.weight.detach(), layer.bias.detach()], [cache] * 3)


# -- what is kept -----------------------------------------------------------------------------------------------------


class Memory(bytearray):
    """Memory of a tensor; a weak reference shows whether it still exists."""


def memory_of(layer: Layer) -> tuple[dict[str, Tensor], list[weakref.ref[Memory]]]:
    """Return the layer's constants in memory that they alone keep, and weak references to that memory."""
    tensors, seen = {}, []
    for name, value in constants(layer).items():
        memory = Memory(value.numpy().tobytes())
        tensors[name] = torch.frombuffer(memory, dtype=value.dtype)
        seen.append(weakref.ref(memory))
    return tensors, seen


def by_the_kernels(package: Path, library: Path, tensors: dict[str, Tensor], cache: Tensor) -> Run:
    return open_row([GraphUse(library, tensors.__getitem__, [cache])])


def by_torch(package: Path, library: Path, tensors: dict[str, Tensor], cache: Tensor) -> Run:
    return load_graph(package, {name.upper(): value for name, value in tensors.items()}, [cache], name_of=str.upper)


@pytest.mark.parametrize("load", [by_the_kernels, by_torch])
def test_weights_go_with_the_last_that_runs_their_graph(
    package: Path, library: Path, load: Callable[[Path, Path, dict[str, Tensor], Tensor], Run]
) -> None:
    layer, cache = Layer(), torch.zeros(ROWS, SIZE)
    tensors, seen = memory_of(layer)
    run = load(package, library, tensors, cache)
    x, other = torch.randn(ROWS, SIZE), torch.randn(ROWS, SIZE)
    with torch.no_grad():
        torch.testing.assert_close(run([x, other]), [*layer(x, other, torch.empty(ROWS, SIZE))])
    assert all(memory() is not None for memory in seen)
    tensors.clear()
    del run
    gc.collect()
    assert [memory() for memory in seen] == [None, None]


def test_a_row_that_cannot_be_opened_keeps_nothing(library: Path) -> None:
    tensors, seen = memory_of(Layer())
    cache = torch.zeros(ROWS, SIZE)
    good = GraphUse(library, tensors.__getitem__, [cache])
    with pytest.raises(RuntimeError, match="open_graph: memory is 3 tensors, and it takes 3"):
        open_row([good, GraphUse(library, tensors.__getitem__, [cache] * 3)])
    del good
    tensors.clear()
    gc.collect()
    assert [memory() for memory in seen] == [None, None]


@pytest.mark.long
def test_a_graph_that_fails_keeps_none_of_its_inputs(tmp_path: Path) -> None:
    example = (torch.zeros(ROWS, SIZE), torch.tensor([1]), torch.zeros(ROWS, SIZE))
    library = unpacked(compiled(Chosen(), example, tmp_path / "chosen.pt2"))
    row = open_row([GraphUse(library, {}.__getitem__, [torch.zeros(ROWS, SIZE)])])
    x = torch.randn(ROWS, SIZE)
    before = x._use_count()  # type: ignore[attr-defined]
    for chosen in (ROWS, 2, ROWS):
        if chosen < ROWS:
            torch.testing.assert_close(row([x, torch.tensor([chosen])])[0], x[[chosen]] + 1)
        else:
            with pytest.raises(RuntimeError, match=r"a compiled graph failed: .*index out of bounds"):
                row([x, torch.tensor([chosen])])
    assert x._use_count() == before  # type: ignore[attr-defined]


# -- graphs that cannot be loaded -------------------------------------------------------------------------------------


def shortened(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-300])


def blanked(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    file.write_bytes(data)


def emptied(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data/version", "1")


@pytest.mark.parametrize("harm", [shortened, blanked, emptied])
def test_a_damaged_graph_is_named(package: Path, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    file = Path(shutil.copy(package, tmp_path / "layers0.pt2"))
    harm(file)
    words = r"layers0\.pt2 is damaged \(.+\); copy it again or rebuild the engine"
    with pytest.raises(CheckpointError, match=words), loading(file):
        unpack(file, tmp_path)


def test_a_folder_that_graphs_cannot_be_loaded_from_is_named(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(EngineError, match=r"cannot be loaded .*set TMPDIR to a folder that has room"):
        load_graph(package, {}, [])


@pytest.mark.long
def test_a_graph_that_calls_ops_by_the_dispatcher_is_for_torch_s_loader(package: Path, tmp_path: Path) -> None:
    example = (torch.randn(ROWS, SIZE), torch.randn(SIZE), torch.zeros(ROWS, SIZE))
    normed = compiled(Normed(), example, tmp_path / "normed.pt2")
    assert unpack(normed, tmp_path) is None
    assert unpack(package, tmp_path) == tmp_path / "layer.so"
    (given,) = load_graph(normed, {}, [torch.zeros(ROWS, SIZE)])([*example[:2]])
    torch.testing.assert_close(given, rms_norm(*example[:2], 1e-5))


def test_a_row_may_go_while_another_model_is_traced(library: Path) -> None:
    """The garbage collector may run at any time. A trace neither contains its work nor keeps it from being done."""
    given = torch.ones(SIZE)
    layer, lent = Layer(), Lent()
    borrowers = [layer, open_row([use(library, layer, torch.zeros(ROWS, SIZE))])]
    (number,) = borrowers[1].args[0]  # type: ignore[attr-defined]
    own = lent.lend(given)
    lent.until_gone(layer)
    del layer

    def traced(x: Tensor) -> Tensor:
        borrowers.clear()
        gc.collect()
        return x + 1

    graph = make_fx(traced, tracing_mode="fake")(torch.ones(2)).graph
    assert [node.name for node in graph.nodes if node.op == "call_function"] == ["add"]
    assert (own.numel(), given.numel()) == (0, SIZE)
    with pytest.raises(RuntimeError, match=f"run_graphs: graph {number} is not open"):
        torch.ops.trtspec_graphs.run_graphs([number], [torch.zeros(ROWS, SIZE)])
