"""`trtspec build --dry_run` against real engines: the planned graphs, profiles and bytes are those of the build."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.e2e.conformance import LIMITS, assert_as_planned, make_models
from tests.e2e.tiny import make_target
from trtspec.backends.compiled import CompiledStep, Graph
from trtspec.backends.cuda import aoti as cuda_aoti
from trtspec.backends.describe import Calls, describe_graph
from trtspec.backends.export import example_for, export_step
from trtspec.backends.graph_io import graph_inputs, input_names
from trtspec.backends.sizes import Sizes
from trtspec.backends.table import BACKENDS
from trtspec.build.build import build_engine
from trtspec.build.context import plan_context
from trtspec.build.plan import plan_build
from trtspec.build.steps import build_steps
from trtspec.cli import main
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.step import Step

K = 2  # smallest number with more than one pass of draft layers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


WISHES = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": K},
    "draft": {"method": "draft_model", "model": "draft", "num_speculative_tokens": K},
    "eagle3": {"method": "eagle3", "model": "head", "num_speculative_tokens": K},
    "eagle3_two_engine": {"method": "eagle3", "model": "head", "num_speculative_tokens": K, "one_engine": False},
}


def wanted(models: Path, mode: str) -> SpeculativeConfig | None:
    wishes = WISHES[mode]
    named = {"model": str(models / str(wishes["model"]))} if wishes and "model" in wishes else {}
    return wishes and read_speculative_config({**wishes, **named})


def test_a_graph_for_each_draft_length_of_a_schedule(models: Path) -> None:
    wishes = {"method": "eagle3", "model": str(models / "head"), "num_speculative_tokens": 3}
    speculative = read_speculative_config({**wishes, "draft_len_schedule": {5: 3, 7: 1}})
    for backend, kinds in (("aoti", ("ragged", "uniform")), ("tensorrt", ("ragged",))):
        plan = plan_build(models / "target", speculative, EngineConfig(backend=backend, **LIMITS))
        made = plan.executables["target"]
        assert [(graph.draft_len, graph.kind) for graph in made.graphs] == [(n, k) for n in (0, 1, 3) for k in kinds]
    assert [made.profiles[n][1].shapes["input_ids"][2] for n in (0, 1, 3)] == [(8,), (16,), (32,)]
    assert made.profiles[0][0].shapes["draft_tokens"][1] == (8, 0)


def test_draft_layers_next_to_the_target(models: Path) -> None:
    """Graphs of draft layers next to the target take its hidden states, of three layers of width 32.

    There is one graph for each draft length of a schedule, and one for rows that only write draft KV.
    """
    speculative = wanted(models, "eagle3_two_engine")
    assert speculative is not None
    scheduled = speculative.model_copy(update={"draft_len_schedule": {2: K, 8: 1}})
    for wishes, lengths in ((speculative, [0, K]), (scheduled, [0, 1, K])):
        plan = plan_build(models / "target", wishes, EngineConfig(backend="aoti", **LIMITS))
        assert plan.mode == "EAGLE3"
        target, head = plan.executables["target"], plan.executables["draft"]
        assert [(graph.draft_len, graph.kind) for graph in target.graphs] == [(0, "ragged")]
        assert [output.name for output in target.graphs[0].outputs] == ["tokens", "hidden_states", "logits"]
        assert [(graph.draft_len, graph.kind) for graph in head.graphs] == [(n, "ragged") for n in lengths]
        (states,) = [given for given in head.graphs[0].inputs if given.name == "hidden_states"]
        assert (states.dtype, states.shape) == ("float32", ("T", 96))
        drafts = [("next_draft_tokens", ("B", "K")), ("next_draft_lens", ("B",))]
        assert [(given.name, given.shape) for given in head.graphs[-1].outputs] == drafts
        assert (len(target.kv.layers), len(head.kv.layers)) == (3, 1)
        assert list(head.weights) == ["draft"]


def test_profiles_of_draft_layers_next_to_the_target(models: Path) -> None:
    plan = plan_build(
        models / "target", wanted(models, "eagle3_two_engine"), EngineConfig(backend="tensorrt", **LIMITS)
    )
    head = plan.executables["draft"]
    assert sorted(head.profiles) == [0, K]
    mixed, _ = head.profiles[K]
    rows = LIMITS["max_num_tokens"]
    assert (mixed.shapes["hidden_states"][0], mixed.shapes["hidden_states"][2]) == ((1, 96), (rows, 96))


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        pytest.param("eagle3", "aoti", marks=pytest.mark.long),
        pytest.param("eagle3", "onnx", marks=pytest.mark.long),
        pytest.param("draft", "onnx", marks=pytest.mark.long),
        ("ngram", "onnx"),
    ],
)
def test_the_engine_is_as_planned(models: Path, tmp_path: Path, mode: str, backend: str) -> None:
    config = EngineConfig(backend=backend, dtype="float32", **LIMITS)
    target, layers = (make_target(tmp_path, num_hidden_layers=1), 1) if mode == "ngram" else (models / "target", 3)
    plan = plan_build(target, wanted(models, mode), config)
    assert plan.missing == ()
    build_engine(target, tmp_path / "engine", wanted(models, mode), config)
    for role, written in assert_as_planned(plan, tmp_path / "engine").items():
        made = plan.executables[role]
        if backend == "aoti":
            unread = 13 * 8  # a head's target_ids: graphs read their distance, d2t
            assert sum(written.values()) == sum(made.weights.values()) + made.tables - unread
        else:  # small constants are inside the graphs: norms, of 32 fp32; tables are folded with what follows them
            norms = 2 * layers + 1 + (4 if mode == "eagle3" else 0)
            weights = sum(size for name, size in written.items() if name.endswith(".weight"))
            assert weights == sum(made.weights.values()) - norms * 32 * 4


ON_A_GPU = {
    "none": {"target": [(0, "ragged"), (0, "uniform")]},
    "ngram": {"target": [(K, "ragged"), (0, "uniform"), (K, "uniform")]},
    "draft": {
        "target": [(K, "ragged"), (0, "uniform"), (K, "uniform")],
        "draft": [(0, "ragged"), (0, "uniform")],
    },
    "eagle3": {"target": [(K, "ragged"), (K, "uniform")]},
    "eagle3_two_engine": {"target": [(K, "ragged")], "draft": [(0, "ragged"), (K, "ragged")]},
}


@pytest.mark.parametrize("mode", ON_A_GPU)
def test_graphs_for_a_gpu_are_as_planned(
    models: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler gets the planned graphs. Here it only records them."""
    asked = {}

    def compile_step(
        step: Step, block_size: int, wanted: list[tuple[int, bool]], folder: Path, *_: object, **__: object
    ) -> CompiledStep:
        asked[folder.name] = [(n, "uniform" if uniform else "ragged") for n, uniform in wanted]
        return CompiledStep.of(step, [Graph("", n, uniform, ()) for n, uniform in wanted])

    monkeypatch.setattr(cuda_aoti, "require", lambda: None)
    monkeypatch.setattr(cuda_aoti, "compile_step", compile_step)
    config = EngineConfig(backend="cuda", **LIMITS)
    plan = plan_build(models / "target", wanted(models, mode), config)
    build_engine(models / "target", tmp_path / "engine", wanted(models, mode), config)
    planned = {name: [(one.draft_len, one.kind) for one in made.graphs] for name, made in plan.executables.items()}
    assert planned == asked == ON_A_GPU[mode]


def test_a_plan_complains_of_headers_as_a_build_would(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "target" / name).write_bytes((models / "target" / name).read_bytes())
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 4, "layer_types": None})
    )
    arguments = ["build", "--checkpoint_dir", str(tmp_path / "target"), "--output_dir", str(tmp_path / "engine")]
    said = []
    for more in ([], ["--dry_run"]):
        assert main([*arguments, *more]) == 1
        said.append(capsys.readouterr().err)
    assert "missing: model.layers.3.input_layernorm.weight" in said[0]
    assert said[0] == said[1]


DESCRIBED = [
    ("none", "ragged", False),
    ("eagle3", "uniform", False),
    ("eagle3_two_engine", "ragged", True),
]
ALSO = [
    *((mode, kind, not functional) for mode, kind, functional in DESCRIBED),
    ("eagle3", "ragged", True),
    ("eagle3", "ragged", False),
]


@pytest.mark.parametrize(
    ("mode", "kind", "functional"), [*DESCRIBED, *(pytest.param(*one, marks=pytest.mark.long) for one in ALSO)]
)
def test_graphs_are_as_described(models: Path, mode: str, kind: str, functional: bool) -> None:
    """The running graph returns the described outputs, and the exported graph calls the described ops.

    Attention, linears, sampling and acceptance stay single nodes that a plugin can take over.
    """

    def step_of(reads_weights: bool) -> Step:
        config = EngineConfig(dtype="float32", **LIMITS)
        backend = replace(BACKENDS["eager"], functional=functional)
        context = plan_context(models / "target", wanted(models, mode), config, backend)
        steps = build_steps(context if reads_weights else context.described())
        return steps["draft" if mode == "eagle3_two_engine" else "target"]

    bare = step_of(False)
    draft_len = 0 if mode == "none" else K
    verified = draft_len if mode == "eagle3" else 0
    sizes = Sizes(batch_size=8, rows=32, draft_len=verified, columns=9, blocks=30, block_size=4)
    described = describe_graph(bare, sizes, kind, draft_len, functional)

    step = step_of(True)
    uniform = kind == "uniform"
    example = example_for(step, draft_len, 4, uniform)
    blocks = int(example.attn.block_tables.max()) + 1
    kv = [(torch.zeros(blocks, 4, h, d), torch.zeros(blocks, 4, h, d)) for h, d, _ in bare.kv_layers]
    program = export_step(step, example, kv, uniform)
    assert calls_of(program.graph) == Counter({call.name: call.count for call in merged(described.calls)})
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any(name.startswith(("aten.mm", "aten.linear", "aten.scaled_dot", "aten.argmax")) for name in called)
    if (mode, functional) == ("eagle3", False):
        ops = {"packed_linear", "spec_attention_", "process_logits", "spec_sample", "spec_accept"}
        assert {name.split(".")[1] for name in called if name.startswith("trtspec.")} == ops
    tensors = graph_inputs(example, input_names(step, uniform))
    given, _ = program.module()(tensors, kv)
    B, R = len(tensors["kv_lens"]), len(tensors["temperatures"])
    known = {"B": B, "R": R, "T": len(tensors["input_ids"]), "K": draft_len, "K + 1": draft_len + 1}
    for output in described.outputs:
        tensor = given[output.name]
        assert tuple(known.get(str(size), size) for size in output.shape) == tuple(tensor.shape)
        assert str(tensor.dtype) == f"torch.{output.dtype}"
    assert {output.name for output in described.outputs} == given.keys()


def merged(calls: tuple[Calls, ...]) -> list[Calls]:
    counts = Counter(dict.fromkeys((call.name for call in calls), 0))
    for call in calls:
        counts[call.name] += call.count
    return [Calls(name, (), count) for name, count in counts.items()]


def calls_of(graph: torch.fx.Graph) -> Counter[str]:
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return Counter(t._schema.name.removeprefix("trtspec::") for t in targets if t.namespace == "trtspec")
