"""Loading of kernels: the choice by the environment, and the message where kernels cannot run."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import trtspec_plugins.triton as triton_kernels

import trtspec.ops
from trtspec.ops import load_plugins

REPORT = """
import logging, sys
logging.basicConfig()
from trtspec.ops import load_plugins
import torch
print(sorted(load_plugins()), "triton" in sys.modules)
print(torch._C._dispatch_has_kernel_for_dispatch_key("trtspec::spec_sample", "CPU"))
"""


@dataclass(frozen=True)
class Package:
    """An entry point."""

    name: str
    function: Callable[[], str]

    def load(self) -> Callable[[], str]:
        return self.function


def fails() -> str:
    raise ImportError("no such machine")


Loads = Callable[..., tuple[object, str]]
PACKAGES = [Package("cpu", lambda: "fast"), Package("gpu", lambda: ""), Package("old", fails)]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Loads:
    """A function (TRTSPEC_PLUGINS, packages) -> the packages that load, and the text that is logged."""

    def load(asked: str | None, packages: list[Package] = PACKAGES) -> tuple[object, str]:
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: packages)
        monkeypatch.delenv("TRTSPEC_PLUGINS", raising=False)
        if asked is not None:
            monkeypatch.setenv("TRTSPEC_PLUGINS", asked)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            result = load_plugins.__wrapped__()
        return result, caplog.text

    return load


def test_what_cannot_run_is_reported_and_what_has_nothing_to_do_is_not(
    loaded: Loads,
) -> None:
    result, said = loaded(None)
    assert result == {"cpu": "fast"}
    assert "old kernels do not serve, the reference kernels do: no such machine" in said
    assert "gpu" not in said


def test_plugins_can_be_asked_for_by_name(loaded: Loads) -> None:
    assert loaded("cpu") == ({"cpu": "fast"}, "")
    assert loaded("gpu, cpu") == ({"cpu": "fast"}, "")
    assert loaded("gpu") == ({}, "")
    assert loaded("0") == ({}, "")
    assert loaded("")[0] == {"cpu": "fast"}
    result, said = loaded("tpu,cpu")
    assert result == {"cpu": "fast"}
    assert "TRTSPEC_PLUGINS=tpu,cpu: 'tpu' is not installed; there are: cpu, gpu, old" in said
    assert "there are: none" in loaded("cpu", [])[1]


# --- the Triton kernels ---------------------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dispatch keys that `load` would register for; nothing is registered."""
    keys: list[str] = []
    monkeypatch.delenv("TRTSPEC_TRITON", raising=False)
    monkeypatch.setattr(triton_kernels, "register", lambda key: keys.append(key) or "3")
    return keys


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")


def test_without_a_gpu_nothing_is_registered(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_kernels.load() == ""
    assert registered == []


def test_a_gpu_gets_the_kernels(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, 9, 0)
    assert triton_kernels.load() == "sm_90, Triton 3"
    assert registered == ["CUDA"]


def test_a_gpu_that_is_too_old_is_named(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, 7, 5)
    with pytest.raises(ImportError, match="Card is sm_75, and they want sm_80 or newer"):
        triton_kernels.load()
    assert registered == []


def test_the_interpreter_is_asked_for_in_two_words(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter needs two variables, TRTSPEC_TRITON and TRITON_INTERPRET.

    TRITON_INTERPRET decides when kernels are defined whether they are interpreted or compiled, so `load` cannot set it.
    """
    monkeypatch.setenv("TRTSPEC_TRITON", "interpret")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ImportError, match="TRTSPEC_TRITON=interpret wants TRITON_INTERPRET=1"):
        triton_kernels.load()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_kernels.load() == "interpreted, Triton 3"
    assert registered == ["CPU"]
    monkeypatch.setenv("TRTSPEC_TRITON", "compile")
    with pytest.raises(ImportError, match="TRTSPEC_TRITON=compile: it may be interpret, or not be set"):
        triton_kernels.load()


def test_without_triton_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r"Triton is missing \(.*\): pip install 'trtspec\[triton\]'"):
        triton_kernels.register("CUDA")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux alone")
def test_triton_is_there() -> None:
    """Triton is installed; without it every other test of its kernels is skipped."""
    assert importlib.util.find_spec("triton") is not None


@pytest.mark.parametrize("op", triton_kernels.OPS)
def test_launchers_take_what_their_ops_are_given(op: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here: pip install 'trtspec[triton]'")
    assert trtspec.ops is not None  # defines the ops
    module = importlib.import_module(f"trtspec_plugins.triton.{triton_kernels.OPS[op]}")
    schema = getattr(torch.ops.trtspec, op).default._schema
    assert list(inspect.signature(getattr(module, op)).parameters) == [argument.name for argument in schema.arguments]


def in_a_process(**environment: str) -> tuple[list[str], str]:
    """Return what a fresh interpreter says of its kernels."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("TRTSPEC_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-c", REPORT],
        env={**plain, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines(), done.stderr


def test_without_a_gpu_triton_is_not_even_imported() -> None:
    assert in_a_process(TRTSPEC_PLUGINS="triton") == (["[] False", "False"], "")


def test_the_interpreter_serves_the_ops_of_the_cpu() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here: pip install 'trtspec[triton]'")
    asked = {"TRTSPEC_PLUGINS": "triton", "TRTSPEC_TRITON": "interpret"}
    assert in_a_process(**asked, TRITON_INTERPRET="1") == (["['triton'] True", "True"], "")
