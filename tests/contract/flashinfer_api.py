"""Signatures of the FlashInfer functions that trtspec calls, from the package and as plain data.

`flashinfer_api.json` next to this file records the signatures of the version that it names. Calls are bound to it where
FlashInfer is not installed. test_flashinfer_api.py compares it with the package; `make contract-flashinfer` with
TRTSPEC_RECORD=1 in the environment writes it again.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import operator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("flashinfer_api.json")
WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"
NAMES = (
    "append_paged_kv_cache",
    f"{WRAPPER}.__init__",
    f"{WRAPPER}.plan",
    f"{WRAPPER}.run",
    "sampling.top_k_mask_logits",
    "sampling.top_p_renorm_probs",
)


def signatures() -> dict[str, Signature]:
    """Return the signature of each name, from the package if it is installed, otherwise as recorded."""
    known = record() if importlib.util.find_spec("flashinfer") else json.loads(FILE.read_text(encoding="utf-8"))
    return {name: Signature([_parameter(*one) for one in known["functions"][name]]) for name in NAMES}


def record() -> dict[str, Any]:
    """Record the installed package: for each function its parameters, as name, kind and, where it has one, default."""
    import flashinfer

    functions = {}
    for name in NAMES:
        parameters = inspect.signature(operator.attrgetter(name)(flashinfer)).parameters.values()
        functions[name] = [
            [one.name, one.kind.name, *([] if one.default is Parameter.empty else [one.default])] for one in parameters
        ]
    return {"version": flashinfer.__version__, "functions": functions}


def text(recorded: dict[str, Any]) -> str:
    """Return a record as JSON, with one line per function."""
    lines = [f"  {json.dumps(name)}: {json.dumps(parameters)}" for name, parameters in recorded["functions"].items()]
    return f'{{\n "version": {json.dumps(recorded["version"])},\n "functions": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def _parameter(name: str, kind: str, *default: Any) -> Parameter:
    return Parameter(name, getattr(Parameter, kind), **({"default": default[0]} if default else {}))
