"""FlashInfer as the kernel of two of our ops, for NVIDIA GPUs from SM80 on: off unless TRTSPEC_FLASHINFER names it.

| TRTSPEC_FLASHINFER | op | what it takes | what it costs |
|---|---|---|---|
| attention | spec_attention_ | batches with long prompts, outside CUDA graphs (attention.py) | bitwise equality |
| filter | process_logits | top-k and top-p of vocabularies from 2048 tokens on (logits.py) | see there |

A comma joins both: TRTSPEC_FLASHINFER=attention,filter. Calls that FlashInfer does not take go to the kernel that was
registered before: Triton's, or the reference.

**attention gives up the guarantee that a row's bits depend on its own tokens alone**, and with it that speculation
changes nothing bit for bit. FlashInfer may prefill the same prompt in one batch, and our kernel in another. The prompt
may be cut in other chunks, be found in the cache or not, or be prefilled again after a preemption. The two kernels
round differently. The differences are those of rounding; they decide between tokens that are almost equally likely.

It is off because its speed has not been measured: neither part has run on a GPU. Tests without a GPU show that every
call binds to FlashInfer's own signatures. They also show that the arguments describe the batch: a stand-in computes
from them what FlashInfer documents, and gives the references' results (tests/plugins/test_flashinfer.py, make
contract-flashinfer).

FlashInfer compiles its kernels when they are first called. For this it needs nvcc and ninja, or its package
flashinfer-jit-cache.

Its samplers are not used: they draw their own random numbers, and a draw here is a function of seed, position and
logits.
"""

from __future__ import annotations

import os
import warnings
from types import ModuleType

import torch
from trtspec_plugins.flashinfer.attention import Attention
from trtspec_plugins.flashinfer.logits import Filter

PARTS = {"attention": ("spec_attention_", Attention), "filter": ("process_logits", Filter)}
LEAST_CAPABILITY = (8, 0)


def load() -> str:
    """Register with torch the parts that TRTSPEC_FLASHINFER names. Returns those names, or "" if it names nothing.

    ValueError if it names something else. ImportError, with advice, without FlashInfer or a GPU for it.
    """
    text = os.environ.get("TRTSPEC_FLASHINFER", "")
    asked = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in asked if name not in PARTS]
    if unknown:
        raise ValueError(f"TRTSPEC_FLASHINFER={text!r}: there is no {unknown[0]!r}, only {' and '.join(PARTS)}")
    if not asked:
        return ""
    try:
        import flashinfer
    except ImportError as error:
        raise ImportError(f"FlashInfer is missing ({error}): pip install 'trtspec[flashinfer]'") from error
    if not torch.cuda.is_available():
        raise ImportError("FlashInfer needs an NVIDIA GPU, and torch finds none; unset TRTSPEC_FLASHINFER")
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        raise ImportError("FlashInfer is used from SM80 (Ampere) on, and this GPU is older; unset TRTSPEC_FLASHINFER")
    _registered.append(register(asked, flashinfer))
    return ", ".join(asked)


def register(asked: list[str], flashinfer: ModuleType, key: str = "CUDA") -> torch.library.Library:
    """Register the named parts in front of the kernels that are registered now for a dispatch key.

    They last as long as the returned library.
    """
    library = torch.library.Library("trtspec", "IMPL")
    for name in asked:
        op, part = PARTS[name]
        before = torch.library.get_kernel(f"trtspec::{op}", key)
        with warnings.catch_warnings():  # about what is intended here: one kernel replaces another
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            library.impl(op, part(flashinfer, before), key, with_keyset=True, allow_override=True)
    return library


_registered: list[torch.library.Library] = []
