"""FlashInfer under trtspec's ops, through a stand-in: the results are the references'.

The stand-in has FlashInfer's signatures, and computes what FlashInfer documents from its arguments. make
contract-flashinfer takes the signatures from FlashInfer itself.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import trtspec_plugins.flashinfer as plugin
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trtspec_plugins.flashinfer import attention

import trtspec.ops
from tests.flashinfer_stand_in import FlashInfer
from tests.plugins.flashinfer_batches import (
    APPEND,
    INF,
    PLAN,
    RUN,
    Arguments,
    attend,
    batch,
    batches,
    check,
    random_trees,
    serving,
)
from trtspec.ops import dispatch


@settings(deadline=None, max_examples=60)
@given(batches())
def test_attention_is_the_reference_s(arguments: Arguments) -> None:
    wanted = attend(arguments)
    with serving("attention") as stand_in:
        check(arguments, attend(arguments), wanted)
        assert [name for name, _ in stand_in.calls[1:]] == [PLAN, APPEND, RUN]


def test_the_stand_in_s_results_are_what_the_op_returns() -> None:
    """The tests here see the stand-in's results, not those of the kernel that was registered before."""
    arguments = batch([80], [5])
    with serving("attention") as stand_in:
        stand_in.append_paged_kv_cache = lambda *_, **__: None  # type: ignore[method-assign]
        assert torch.isnan(attend(arguments)[0]).all()


def test_what_no_column_covers_is_in_the_scratch_block() -> None:
    arguments = batch([20, 5], [9, 11])
    arguments["block_tables"] = arguments["block_tables"][:, :1].contiguous()
    arguments["k_cache"], arguments["v_cache"] = (arguments[name].nan_to_num() for name in ("k_cache", "v_cache"))
    wanted = attend(arguments)
    with serving("attention") as stand_in:
        check(arguments, attend(arguments), wanted)
        assert stand_in.count(RUN) == 1


def not_taken() -> dict[str, Arguments]:
    usual = batch([80], [5])
    return {
        "sinks": {**usual, "sinks": torch.ones(4)},
        "fp32": batch([80], [5], dtype=torch.float32),
        "head size": batch([80], [5], head_dim=48),
        "few rows a request": batch([80, 1], [5, 80]),
        "a request without rows": batch([90, 0], [5, 7]),
    }


@pytest.mark.parametrize("case", list(not_taken()))
def test_what_flashinfer_does_not_take_goes_to_the_kernel_before(case: str) -> None:
    arguments = not_taken()[case]
    mean_rows = 64 if case == "few rows a request" else 0
    wanted = attend(arguments)
    with serving("attention", mean_rows=mean_rows) as stand_in:
        for got, expected in zip(attend(arguments), wanted, strict=True):
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        assert stand_in.calls == []


def test_rows_of_no_request_go_to_the_kernel_before() -> None:
    """Rows of no request go to the kernel registered before, which raises an error.

    Neither the reference nor the C++ kernel, if that is loaded, has a result for them.
    """
    arguments = {**batch([80], [5]), "cu_q_lens": torch.tensor([0, 79], dtype=torch.int32)}
    with serving("attention") as stand_in, pytest.raises((IndexError, RuntimeError)):
        attend(arguments)
    assert stand_in.calls == []


def test_nothing_is_planned_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = batch([80], [5])
    monkeypatch.setattr(attention, "_capturing", lambda _: True)
    with serving("attention") as stand_in:
        attend(arguments)
        assert stand_in.calls == []


def test_a_mask_of_too_many_elements_goes_to_the_kernel_before(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = batch([70], [10], tree_mask=random_trees([70], 0))
    for limit, runs in ((70 * 80, 1), (70 * 80 - 1, 0)):
        monkeypatch.setattr(attention, "MOST_MASK_ELEMENTS", limit)
        with serving("attention") as stand_in:
            attend(arguments)
            assert stand_in.count(RUN) == runs


def test_a_step_is_planned_once_for_all_layers_of_a_kind() -> None:
    """A step has one plan per kind of layer, and new plans once its metadata is written to.

    All layers of a step call with the same metadata.
    """
    arguments = batch([70, 66], [10, 0])
    lengths = arguments["kv_lens"]
    kinds = [{}, {"window": 9}, {"softcap": 2.0}, {"scale": 0.3}] * 2
    layers = [{**arguments, **kind, "q": arguments["q"] * n} for n, kind in enumerate(kinds, start=1)]
    with serving("attention") as stand_in:
        for _ in range(2):  # the tensors of a step are reused, with other values
            stand_in.calls.clear()
            got = [attend(layer) for layer in layers]
            assert (stand_in.count(PLAN), stand_in.count(RUN)) == (4, 8)
            results = [(layer, result, lengths.clone()) for layer, result in zip(layers, got, strict=True)]
            lengths -= torch.tensor([3, 0], dtype=torch.int32)
        lengths += torch.tensor([6, 0], dtype=torch.int32)
        attend(layers[0])
        assert stand_in.count(PLAN) == 5
    for layer, result, seen in results:
        check(layer, result, attend({**layer, "kv_lens": seen}))


def test_tensors_without_a_version_are_planned_each_time() -> None:
    with torch.inference_mode():
        arguments = batch([70], [10])
    with serving("attention") as stand_in:
        attend(arguments)
        with torch.inference_mode():
            arguments["kv_lens"] -= 1
        got = attend(arguments)
        assert stand_in.count(PLAN) == 2
    check(arguments, got, attend(arguments))


def test_threads_do_not_share_plans() -> None:
    """Each thread reads the plan that it made, though both layers are of one kind."""
    cases = [batch([70], [10], seed=1), batch([90, 80], [3, 4], seed=2)]
    wanted, got = [attend(arguments) for arguments in cases], {}
    barrier = threading.Barrier(2)

    def work(n: int) -> None:
        for _ in range(3):
            barrier.wait(60)
            got[n] = attend(cases[n])

    with serving("attention") as stand_in:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stand_in.count(PLAN) == 2
    for n, arguments in enumerate(cases):
        check(arguments, got[n], wanted[n])


def process(logits: Tensor, **groups: Tensor) -> Tensor:
    """Call process_logits; groups that are not named are unused."""
    ints = ("history", "prompt_lens", "bias_ids", "ban_ids", "allow_mask", "top_ks")
    floats = ("penalties", "bias_values", "temperatures", "top_ps", "min_ps")
    unused = {
        "positions": torch.zeros(len(logits), dtype=torch.int64),
        "ban_until": torch.empty(0, dtype=torch.int64),
        **dict.fromkeys(ints, torch.empty(0, dtype=torch.int32)),
        **dict.fromkeys(floats, torch.empty(0)),
    }
    return trtspec.ops.process_logits(logits, **{**unused, **groups})


@st.composite
def filtered(draw: st.DrawFn) -> dict[str, Tensor]:
    """Rows with and without ties; each group of parameters may be present."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, vocab = draw(st.integers(1, 4)), draw(st.sampled_from([2047, 2048, 3001]))
    logits = 3 * torch.randn(rows, vocab, generator=g)
    if draw(st.booleans()):
        logits = logits.round()
    logits[torch.rand(logits.shape, generator=g) < draw(st.sampled_from([0.0, 0.9]))] = -INF
    choices = {
        "temperatures": [0.0, 0.5, 2.0],
        "top_ks": [-1, 0, 1, 3, 400, 2048, 2**31 - 1],
        "top_ps": [-1.0, 0.0, 0.1, 0.7, 0.999, 1.0, 2.0],
        "min_ps": [0.0, 0.05, 0.5],
    }
    arguments = {"logits": logits, "penalties": 1 + torch.rand(rows, 3, generator=g)}
    arguments["history"] = torch.randint(-1, vocab, (rows, 5), generator=g, dtype=torch.int32)
    arguments["prompt_lens"] = torch.full((rows,), 2, dtype=torch.int32)
    for name, values in choices.items():
        if draw(st.booleans()):
            column = torch.tensor([draw(st.sampled_from(values)) for _ in range(rows)])
            arguments[name] = column.to(torch.int32 if name == "top_ks" else torch.float32)
    return arguments


@settings(deadline=None, max_examples=100)
@given(filtered())
def test_filters_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    """Filters keep the reference's tokens, except within rounding errors of top-p's edge.

    There, the reference keeps a token with p a little higher, or does not with p a little lower.
    """

    def nudged(nudge: float) -> Tensor:
        p = arguments.get("top_ps", torch.empty(0))
        return process(**{**arguments, "top_ps": torch.where((p > 0) & (p < 1), p + nudge, p)})

    fewer, more = nudged(-1e-5), nudged(1e-5)
    with serving("filter") as stand_in:
        got = process(**arguments)
    asked = {"top_ks": "sampling.top_k_mask_logits", "top_ps": "sampling.top_p_renorm_probs"}
    taken = arguments["logits"].shape[1] >= 2048
    assert [name for name, _ in stand_in.calls] == [asked[name] for name in asked if name in arguments and taken]
    assert ((got != -INF) | (fewer == -INF)).all()
    assert ((got == -INF) | (got == more)).all()


def test_ties_with_the_kth_and_with_the_last_of_top_p_stay() -> None:
    """Tokens that tie with the k-th or with the last of top-p stay.

    There are six tokens of a sixth each. p = 0.4 needs three of them, and k = 2 two, so all six stay.
    """
    logits = torch.full((2, 2048), -40.0)
    logits[:, ::400] = 0.0
    with serving("filter") as stand_in:
        for groups in ({"top_ks": torch.tensor([2, 6], dtype=torch.int32)}, {"top_ps": torch.tensor([0.4, 0.9])}):
            assert torch.equal(process(logits, **groups) > -INF, logits == 0)
        assert len(stand_in.calls) == 2


def test_the_kernel_before_may_be_in_python_too() -> None:
    """A kernel in Python, as Triton's is, may be registered before; only calls that FlashInfer refuses reach it."""
    arguments, answer = batch([80], [5]), torch.ones(80, 4, 64, dtype=torch.float16)
    library = torch.library.Library("trtspec", "IMPL")
    library.impl("spec_attention_", lambda *_: answer.clone(), "CPU")
    try:
        with serving("attention"):
            assert torch.equal(attend({**arguments, "sinks": torch.ones(4)})[0], answer)
            assert not torch.equal(attend(arguments)[0], answer)
        assert torch.equal(attend(arguments)[0], answer)
    finally:
        library._destroy()


def test_kernels_go_when_the_registration_goes() -> None:
    arguments = batch([80], [5])
    with serving("attention", "filter") as stand_in:
        attend(arguments)
        seen = len(stand_in.calls)
        assert seen == 4
    attend(arguments)
    assert len(stand_in.calls) == seen


def test_nothing_is_asked_for() -> None:
    assert plugin.load() == ""


def test_an_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_FLASHINFER", "attention, sampling")
    with pytest.raises(ValueError, match=r"there is no 'sampling', only attention and filter"):
        plugin.load()


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the package one line says what to install, and the other kernels serve.

    FlashInfer loads last, so that its kernels take precedence over the others.
    """
    monkeypatch.setenv("TRTSPEC_FLASHINFER", "attention")
    monkeypatch.delenv("TRTSPEC_PLUGINS", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    order: list[str] = []

    def entry(name: str, load: Any) -> SimpleNamespace:
        def noted() -> str:
            order.append(name)
            return str(load())

        return SimpleNamespace(name=name, load=lambda: noted)

    found = [entry("cpu", lambda: "here"), entry("flashinfer", plugin.load), entry("triton", lambda: "")]
    monkeypatch.setattr(dispatch.importlib.metadata, "entry_points", lambda group: found)
    with caplog.at_level(logging.WARNING, logger="trtspec.ops.dispatch"):
        assert dispatch.load_plugins.__wrapped__() == {"cpu": "here"}
    assert order == ["cpu", "triton", "flashinfer"]
    [line] = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert "pip install 'trtspec[flashinfer]'" in line


@pytest.mark.parametrize(
    ("available", "capability", "said"), [(False, (9, 0), "needs an NVIDIA GPU"), (True, (7, 5), "from SM80")]
)
def test_without_a_gpu_for_it_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch, available: bool, capability: tuple[int, int], said: str
) -> None:
    monkeypatch.setenv("TRTSPEC_FLASHINFER", "filter")
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ImportError, match=said):
        plugin.load()


def test_with_a_gpu_it_registers_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_FLASHINFER", "filter,attention")
    monkeypatch.setitem(sys.modules, "flashinfer", FlashInfer())  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(plugin, "_registered", [])
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert plugin.load() == "filter, attention"
    assert all(has(f"trtspec::{op}", "CUDA") for op in ("spec_attention_", "process_logits"))
    plugin._registered.pop()._destroy()
    assert not any(has(f"trtspec::{op}", "CUDA") for op in ("spec_attention_", "process_logits"))


def test_calls_are_bound_to_the_package_s_own_signatures_where_it_is() -> None:
    """The stand-in refuses the calls that FlashInfer would refuse."""
    stand_in = FlashInfer()
    if importlib.util.find_spec("flashinfer"):
        import inspect

        import flashinfer

        real = inspect.signature(flashinfer.append_paged_kv_cache)
        assert list(stand_in.signatures["append_paged_kv_cache"].parameters) == list(real.parameters)
    with pytest.raises(TypeError, match="unexpected keyword argument 'layout'"):
        stand_in.bind(APPEND, *range(8), layout="NHD")
    with pytest.raises(TypeError, match="missing a required argument"):
        stand_in.bind(APPEND, *range(7))
    with pytest.raises(TypeError, match="too many positional"):
        stand_in.bind("sampling.top_k_mask_logits", 1, 2, 3)
