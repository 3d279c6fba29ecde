"""TensorRT's Python bindings as plain data: classes, the parameters of their methods, and enumerations.

`tensorrt_api.json` next to this file is such a record of the version that it names. The stand-in of tests/fake_tensorrt
is made from it, so that code which passes there calls only what exists. test_tensorrt_api.py compares it with the real
bindings; `make contract-tensorrt` with TRTSPEC_RECORD=1 in the environment writes it again.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("tensorrt_api.json")
CLASSES = (
    "Builder", "IActivationLayer", "IAttention", "IBuilderConfig", "ICastLayer", "IConcatenationLayer",
    "IConstantLayer", "ICumulativeLayer", "IDequantizeLayer", "IElementWiseLayer", "IFillLayer", "IGatherLayer",
    "IHostMemory", "IIdentityLayer", "IKVCacheUpdateLayer", "ILayer", "IMatrixMultiplyLayer", "INetworkDefinition",
    "IOptimizationProfile", "IPluginRegistry", "IPluginV3Layer", "IQuantizeLayer", "IReduceLayer", "IScatterLayer",
    "ISelectLayer", "IShapeLayer", "IShuffleLayer", "ISliceLayer", "ISqueezeLayer", "ITensor", "ITimingCache",
    "IUnaryLayer", "IUnsqueezeLayer", "Logger", "PluginField", "PluginFieldCollection", "Weights",
)  # fmt: skip
ENUMS = (
    "ActivationType", "AttentionIOForm", "AttentionNormalizationOp", "BuilderFlag", "CausalMaskKind",
    "CumulativeOperation", "DataType", "ElementWiseOperation", "FillOperation", "GatherMode",
    "HardwareCompatibilityLevel", "KVCacheMode", "MatrixOperation", "MemoryPoolType", "NetworkDefinitionCreationFlag",
    "PluginFieldType", "PreviewFeature", "QuickPluginCreationRequest", "ReduceOperation", "SampleMode", "ScatterMode",
    "TensorRTPhase", "UnaryOperation",
)  # fmt: skip
SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\((?P<parameters>.*)\) -> (?P<returns>.+)$", re.MULTILINE)


def record() -> dict[str, Any]:
    """Record the installed bindings."""
    import tensorrt as trt

    return {
        "version": trt.__version__,
        "classes": {name: _class(getattr(trt, name)) for name in CLASSES},
        "enums": {
            name: {member: int(value) for member, value in getattr(trt, name).__members__.items()} for name in ENUMS
        },
    }


def text(recorded: dict[str, Any]) -> str:
    """Return a record as JSON, with one line per class or enumeration."""
    parts = [f'"version": {json.dumps(recorded["version"])}']
    for kind in ("classes", "enums"):
        lines = [f"  {json.dumps(name)}: {json.dumps(what)}" for name, what in recorded[kind].items()]
        parts.append(f'"{kind}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _class(cls: type) -> dict[str, Any]:
    """Record a class's own members; those of a base class are in that class's record."""
    methods, properties = {}, []
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, property):
            properties.append(name)
        elif callable(getattr(cls, name)) and (name == "__init__" or not name.startswith("_")):
            overloads = _overloads(getattr(cls, name))
            if overloads:
                methods[name] = overloads
    base = cls.__base__.__name__ if cls.__base__ is not None else "object"
    return {"base": base, "methods": methods, "properties": properties}


def _overloads(function: Any) -> list[dict[str, Any]]:
    found = []
    for match in SIGNATURE.finditer(inspect.getdoc(function) or ""):
        if match["parameters"] != "*args, **kwargs":
            parts = [part.strip() for part in split(match["parameters"])]
            taken = [[part.split(":")[0].split("=")[0].strip(), "=" in part] for part in parts]
            found.append(
                {"takes": [one for one in taken if one[0] != "self"], "gives": match["returns"].split(".")[-1]}
            )
    return found


def split(text: str) -> list[str]:
    """Split a list of parameters at the commas that are not in brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]
