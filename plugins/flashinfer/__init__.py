"""FlashInfer behind two of our ops, for NVIDIA GPUs from SM80 on: off, unless TRTSPEC_FLASHINFER names them.

| TRTSPEC_FLASHINFER | op | what it takes | what it costs |
|---|---|---|---|
| attention | spec_attention_ | batches with long prompts, outside CUDA graphs (attention.py) | bitwise equality |
| filter | process_logits | top-k and top-p of vocabularies from 2048 tokens on (logits.py) | see there |

Both with a comma: TRTSPEC_FLASHINFER=attention,filter. What they do not take goes to the kernel that was registered
before: Triton's, or the reference.

**attention gives up the guarantee that a row's bits depend on its own tokens alone**, and with it that speculation
changes nothing bit for bit. The same prompt may be read by FlashInfer in one batch and by our kernel in another, cut
in other chunks, found in the cache or not, and the two round differently; so may a request that is preempted and read
again. Differences are those of rounding, which decide between tokens that are almost equally likely.

It is off because nobody has measured whether it is faster: neither part has run on a GPU. What is shown without one:
every call binds to FlashInfer's own signatures, and the arguments describe the batch, as a stand-in that computes from
them what FlashInfer documents gives the references' results (tests/plugins/test_flashinfer.py, make
contract-flashinfer).

FlashInfer compiles its kernels when they are first called, for which it wants nvcc and ninja, or its package
flashinfer-jit-cache.

Its samplers are not used: they draw numbers of their own, and a draw here is a function of seed, position and logits.
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
    """Register with torch what TRTSPEC_FLASHINFER names; returns those names, "" where it names nothing.

    ValueError where it names something else; ImportError, with what to do, without FlashInfer or a GPU for it.
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
    """Put the named parts before the kernels that are registered now for a dispatch key; they last as long as what is
    returned."""
    library = torch.library.Library("trtspec", "IMPL")
    for name in asked:
        op, part = PARTS[name]
        before = torch.library.get_kernel(f"trtspec::{op}", key)
        with warnings.catch_warnings():  # of what is meant here: a kernel in the place of another
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            library.impl(op, part(flashinfer, before), key, with_keyset=True, allow_override=True)
    return library


_registered: list[torch.library.Library] = []
