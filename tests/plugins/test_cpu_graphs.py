"""Compiled graphs that the kernels' library runs in a row."""

from __future__ import annotations

import gc
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trtspec.ops import GraphUse, load_plugins, open_row

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

ROWS, SIZE = 3, 32  # small constants become text of a graph


class Layer(nn.Module):
    """Writes x into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))
        self.bias = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor, beside: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache.copy_(x)
        return x - beside, x * self.weight + beside * self.bias


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    example = (torch.zeros(ROWS, SIZE), torch.zeros(ROWS, SIZE), torch.zeros(ROWS, SIZE))
    program = torch.export.export(Layer(), example, strict=False)
    options = {"aot_inductor.package_constants_in_so": False}
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "layer.pt2"), inductor_configs=options
    )
    with zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        return Path(archive.extract(name, folder))


def use(library: Path, layer: Layer, cache: Tensor) -> GraphUse:
    return GraphUse(library, {name: value.detach() for name, value in layer.named_parameters()}.__getitem__, [cache])


def test_each_is_given_what_the_one_before_gives(library: Path) -> None:
    layers, caches = [Layer() for _ in range(4)], [torch.zeros(ROWS, SIZE) for _ in range(4)]
    row = open_row([use(library, *one) for one in zip(layers, caches, strict=True)])
    for _ in range(3):
        first, beside = torch.randn(ROWS, SIZE), torch.randn(ROWS, SIZE)
        given = row([first, beside])
        x, wanted = first, []
        for layer, cache in zip(layers, caches, strict=True):
            before = x
            with torch.no_grad():
                difference, x = layer(before, beside, torch.empty(ROWS, SIZE))
            wanted += [difference, x]
            torch.testing.assert_close(cache, before)
        torch.testing.assert_close(given, wanted)


def test_rows_have_weights_of_their_own(library: Path) -> None:
    layers = [Layer(), Layer()]
    rows = [open_row([use(library, layer, torch.zeros(ROWS, SIZE))]) for layer in layers]
    x, beside = torch.randn(ROWS, SIZE), torch.zeros(ROWS, SIZE)
    for layer, row in zip(layers, rows, strict=True):
        torch.testing.assert_close(row([x, beside])[1], x * layer.weight.detach())


def test_weights_and_caches_stay_where_they_are(library: Path) -> None:
    layer, cache = Layer(), torch.zeros(ROWS, SIZE)
    row = open_row([use(library, layer, cache)])
    x, beside = torch.randn(ROWS, SIZE), torch.zeros(ROWS, SIZE)
    with torch.no_grad():
        layer.weight.fill_(2)
    torch.testing.assert_close(row([x, beside])[1], 2 * x)
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
