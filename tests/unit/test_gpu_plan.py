"""The plan of a GPU's memory, and the errors if memory is too small. No GPU is used."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.checkpoints import make_checkpoint
from tests.head_checkpoints import make_eagle, make_eagle3
from trtspec.backends.compiled import CompiledStep
from trtspec.backends.describe import describe_graph
from trtspec.backends.sizes import Sizes
from trtspec.backends.table import BACKENDS
from trtspec.build import kv_plan
from trtspec.build.context import BuildContext, Role, plan_context
from trtspec.build.engine_folder import EngineFolder
from trtspec.build.gpu_plan import gpu_memory, plan_gpu_blocks
from trtspec.build.kv_plan import bytes_per_block, plan_kv_blocks
from trtspec.build.steps import build_steps
from trtspec.config.engine import EngineConfig
from trtspec.errors import CapacityError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.step import Step
from trtspec.models.layers import weight_bytes

pytestmark = pytest.mark.slow

MUCH = 10**10


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with most of its weights in linears that can be quantised, so that quantisation matters."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 400, "num_hidden_layers": 2, "head_dim": 32}
    return make_checkpoint(tmp_path_factory.mktemp("gpu_plan"), "llama", **sizes)


def planned(target: Path, speculation: dict[str, Any] | None = None, **options: Any) -> BuildContext:
    fields = {"max_batch_size": 4, "max_num_tokens": 256, "max_seq_len": 128, "backend": "cuda", **options}
    return plan_context(target, read_speculative_config(speculation), EngineConfig(**fields), BACKENDS["cuda"])


def parts(model: BuildContext, free: int = MUCH) -> int:
    """Bytes of all parts but the cache and the margin."""
    return sum(size for name, size in gpu_memory(model, free).items() if name != "margin")


@pytest.mark.parametrize("mode", ["none", "eagle3", "eagle_two_engine", "draft_model"])
def test_weights_are_counted_as_they_will_be_loaded(target: Path, tmp_path: Path, mode: str) -> None:
    heads = {
        "eagle3": lambda: make_eagle3(tmp_path, target, (0, 1), tuple(range(11))),
        "eagle_two_engine": lambda: make_eagle(tmp_path, target),
        "draft_model": lambda: target,
    }
    speculation = None
    if mode != "none":
        method = mode.removesuffix("_two_engine")
        speculation = {"method": method, "model": str(heads[mode]()), "num_speculative_tokens": 2}
        speculation |= {"one_engine": False} if mode.endswith("two_engine") else {}
    model = planned(target, speculation)
    made = [*build_steps(model).values()]
    loaded = weight_bytes(*made)
    assert (loaded < sum(map(weight_bytes, made))) == (
        mode == "eagle_two_engine"
    )  # by the target's embedding and lm_head
    assert gpu_memory(model, MUCH)["weights"] == loaded > 10**6


class _Peak(TorchDispatchMode):
    """The most bytes that tensors made within the mode hold at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        results = op(*args, **(kwargs or {}))
        for one in tree_leaves(results):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given:
                size = one.untyped_storage().nbytes()
                self.alive += size
                self.most = max(self.most, self.alive)
                weakref.finalize(one.untyped_storage(), self._free, size)
        return results

    def _free(self, size: int) -> None:
        self.alive -= size


def test_a_launch_takes_no_more_than_is_counted(target: Path) -> None:
    """Tensors that are alive at the same time, in a launch of the largest size on the meta device, were counted."""
    model = planned(target, dtype="bfloat16")
    (step,) = build_steps(model.described()).values()
    with _Peak() as peak:
        describe_graph(step, Sizes.of(model.config, 128, 0, 0), "ragged", 0, functional=False)
    assert peak.most <= gpu_memory(model, MUCH)["activations"]


def test_graphs_of_a_draft_have_two_rows_a_request(target: Path) -> None:
    """CUDA graphs of a draft are as large as those of a target that verifies one draft, but with one row of logits.

    Both have two rows per request. The target's also keep the logits for the host, once for all graphs.
    """
    model = planned(target, {"method": "draft_model", "model": str(target), "num_speculative_tokens": 1})
    both = gpu_memory(model, MUCH)["CUDA graphs"]
    alone = gpu_memory(planned(target), MUCH)["CUDA graphs"]  # of one row and its logits
    logits = model.config.max_batch_size * 400 * 4  # of a row for each request
    assert both == 2 * (2 * (alone - logits)) - 2 * logits + 2 * logits


def test_the_cache_takes_what_is_left_up_to_full_sequences(target: Path) -> None:
    model = planned(target)
    assert plan_gpu_blocks(model, MUCH) == 4 * 128 // 16 + 1
    for blocks in (5, 9, 20):
        free = -(-(parts(model) + blocks * bytes_per_block(model)) * 100 // 95) + 100
        assert plan_gpu_blocks(model, free) == blocks
    assert plan_gpu_blocks(planned(target, num_kv_blocks=7), MUCH) == 7
    assert plan_gpu_blocks(planned(target, num_kv_blocks=3), MUCH) == 3


def test_a_cache_that_does_not_fit_is_refused_with_one_that_does(target: Path) -> None:
    model = planned(target, num_kv_blocks=1000)
    free = (parts(model) + 500 * bytes_per_block(model)) * 100 // 95
    with pytest.raises(CapacityError, match=r"1000 KV blocks of 16 tokens take .* num_kv_blocks = (\d+) fit") as error:
        plan_gpu_blocks(model, free)
    fitting = int(re.findall(r"num_kv_blocks = (\d+)", str(error.value))[0])
    assert 495 <= fitting <= 500
    assert plan_gpu_blocks(planned(target, num_kv_blocks=fitting), free) == fitting


def test_what_would_fit_is_said_and_does(target: Path) -> None:
    """Every setting that the error names does fit. Without graphs there is more room, too."""
    for rows, setting in ((2048, "max_num_tokens"), (64, "quantization")):
        model = planned(target, max_num_tokens=rows)
        needed = parts(model) + 5 * bytes_per_block(model)
        with pytest.raises(CapacityError, match="these would fit: ") as error:
            plan_gpu_blocks(model, needed)
        named = re.findall(r"(quantization|max_num_tokens|max_batch_size) = ('\w+'|\d+)", str(error.value))
        assert setting in {name for name, _ in named}
        for name, value in named:
            change = {"max_num_tokens": rows, name: value.strip("'") if "'" in value else int(value)}
            assert plan_gpu_blocks(planned(target, **change), needed) >= 2
    with pytest.raises(CapacityError, match="no smaller setting of this model fits"):
        plan_gpu_blocks(model, 10**5)
    less = parts(planned(target, enable_cuda_graph=False))
    assert less < parts(planned(target))


def test_the_least_cache_is_of_one_request_where_its_size_is_asked_for(target: Path) -> None:
    """The least cache holds one request if its size is given, both in the memory that is needed and in the remedies.

    A block takes 67 MB here.
    """
    for options, least in (({}, "0.34"), ({"num_kv_blocks": 9}, "0.13"), ({"kv_cache_memory": 10**9}, "0.13")):
        with pytest.raises(CapacityError, match=f"KV cache, at least {least} GB"):
            plan_gpu_blocks(planned(target, block_size=65536, **options), 10**8)
    smaller = planned(target, num_kv_blocks=2, max_batch_size=2)
    free = (parts(smaller) + 2 * bytes_per_block(smaller)) * 100 // 95 + 100
    with pytest.raises(CapacityError, match=r"these would fit: .*max_batch_size = 2"):
        plan_gpu_blocks(planned(target, num_kv_blocks=2), free)
    assert plan_gpu_blocks(smaller, free) == 2


def test_the_remedies_for_an_engine_are_those_that_it_takes(target: Path) -> None:
    model = planned(target, max_num_tokens=2048)
    compiled = CompiledStep.of(build_steps(model.described())["target"], ()).to_dict()
    built = EngineFolder(target, {"executables": {"target": compiled}})
    needed = parts(model) + 5 * bytes_per_block(model)
    with pytest.raises(CapacityError, match="these would fit: max_num_tokens = "):
        plan_gpu_blocks(replace(model, built=built), needed)


@pytest.mark.parametrize(
    ("options", "count"), [({}, 1), ({"num_kv_blocks": 7}, 0), ({"kv_cache_memory": 10**6}, 1)], ids=str
)
def test_layers_are_described_for_a_cache_once_and_where_it_matters(
    target: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], count: int
) -> None:
    described: list[BuildContext] = []

    def counted(context: BuildContext) -> dict[Role, Step]:
        described.append(context)
        return build_steps(context)

    monkeypatch.setattr(kv_plan, "build_steps", counted)
    model = planned(target, **options)
    plan_kv_blocks(model)
    assert len(described) == count
    described.clear()
    plan_gpu_blocks(model, MUCH)
    with pytest.raises(CapacityError):
        plan_gpu_blocks(model, 10**5)
    assert len(described) == 2
