"""spec_attention_ by FlashInfer: append_paged_kv_cache, then BatchPrefillWithPagedKVCacheWrapper.

Its plan() needs lengths on the host, so the host waits for the GPU once a step. A CUDA graph cannot capture that, and
it would undo the overlap where a step is launched while the previous one runs. So FlashInfer takes batches outside
graphs whose requests have more than MEAN_ROWS rows on average, as those prefill prompts. It takes fp16 and bf16, a few
head sizes, and no sinks, which the kernels used here ignore. Anything else goes to the next kernel.

The kernels are those that FlashInfer calls fa2, on every GPU: fa3, for Hopper, takes no masks. KV is not split over
programs, so that the other requests do not decide where sums are cut. Even so, bits are not guaranteed (__init__.py). A
key or value that is not finite may reach earlier rows of its own request, which the reference excludes.

A thread is expected to run its steps on one stream: plan() writes memory that kernels in flight on another stream may
read.
"""

from __future__ import annotations

import operator
import threading
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MEAN_ROWS = 64
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
MOST_MASK_ELEMENTS = 2**28  # rows times keys of a tree mask, a byte each while the mask is made
WORKSPACE_BYTES = 2**20  # for the parts of a split KV; nothing is split here


@dataclass(frozen=True, eq=False)
class _Step:
    """A batch in FlashInfer's terms, the same in every layer: P pages of B requests, T rows."""

    qo_indptr: Tensor  # [B+1] int32, host: first row of each request
    kv_indptr: Tensor  # [B+1] int32, host: first page of each request
    last_page_lens: Tensor  # [B] int32, host: 1 .. block_size
    pages: Tensor  # [P] int32, device: block of each page
    kv_indptr_there: Tensor  # the two above on the device
    last_page_lens_there: Tensor
    requests: Tensor  # [T] int32, device: request of each row
    positions: Tensor  # [T] int32, device: position of each row in its sequence
    mask: Tensor | None  # [sum of rows * keys of each request] bool, device; None = causal


_Metadata = tuple[Tensor, Tensor, Tensor, Tensor]


class _Thread(threading.local):
    """A record of a thread's last plans. Threads do not share wrappers, as run() reads what plan() stored in them."""

    def __init__(self) -> None:
        self.metadata: _Metadata | None = None
        self.versions: list[int] = []
        self.step: _Step | None = None
        self.wrappers: dict[tuple[Any, ...], Any] = {}  # kind of layer -> wrapper
        self.planned: dict[tuple[Any, ...], _Step] = {}  # kind of layer -> the step its wrapper is for


class Attention:
    """The op spec_attention_. `before` is the kernel to which it passes the calls that FlashInfer does not take."""

    def __init__(self, flashinfer: ModuleType, before: Any) -> None:
        self.flashinfer = flashinfer
        self.before = before
        self.thread = _Thread()

    def __call__(
        self, keyset: Any, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
        cu_q_lens: Tensor, kv_lens: Tensor, block_tables: Tensor, tree_mask: Tensor, sinks: Tensor,
        scale: float, window: int, softcap: float, tree_base: Tensor | None = None, ancestors: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        metadata = (cu_q_lens, kv_lens, block_tables, tree_mask)
        branching = ancestors is not None and ancestors.numel() > 0
        takes = not branching and _takes(q, k_cache, kv_lens, sinks)
        step = self._step(metadata, q.shape[0], k_cache.shape[1]) if takes else None
        if step is None:
            result: Tensor = self.before.call_boxed(
                keyset, q, k, v, k_cache, v_cache, *metadata, sinks, scale, window, softcap, tree_base, ancestors
            )
            return result
        wrapper = self._wrapper(step, q, k_cache, scale, window, softcap)
        self.flashinfer.append_paged_kv_cache(
            k, v, step.requests, step.positions, (k_cache, v_cache),
            step.pages, step.kv_indptr_there, step.last_page_lens_there, kv_layout="NHD",
        )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # [T, Hq, D]
        wrapper.run(q, (k_cache, v_cache), out=out)
        return out

    def _step(self, metadata: _Metadata, num_rows: int, block_size: int) -> _Step | None:
        """The batch's step; None if FlashInfer cannot take it.

        Layers ask one after the other with the same tensors. The last answer is kept while the tensors are the same and
        not written to, by torch's version counter.
        """
        thread = self.thread
        fresh = not any(tensor.is_inference() for tensor in metadata)  # inference tensors have no version counter
        versions = [num_rows, block_size, *(tensor._version for tensor in metadata if fresh)]
        known = thread.metadata
        if not (fresh and known and versions == thread.versions and all(map(operator.is_, known, metadata))):
            thread.step = _make_step(*metadata, num_rows, block_size)
            thread.metadata, thread.versions = metadata, versions
        return thread.step

    def _wrapper(self, step: _Step, q: Tensor, k_cache: Tensor, scale: float, window: int, softcap: float) -> Any:
        """A wrapper that is planned for the step and the layer's kind. A model and its draft have few kinds."""
        thread, (_, Hq, D), (_, block_size, Hkv, _) = self.thread, q.shape, k_cache.shape
        kind = (q.device, q.dtype, Hq, Hkv, D, block_size, scale, window, softcap)
        wrapper = thread.wrappers.get(kind)
        if wrapper is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
            thread.wrappers[kind] = wrapper
        if thread.planned.get(kind) is not step:
            wrapper.plan(
                step.qo_indptr, step.kv_indptr, step.pages, step.last_page_lens, Hq, Hkv, D, block_size,
                custom_mask=step.mask, causal=step.mask is None, sm_scale=scale,
                window_left=window - 1 if window > 0 else -1,  # without the row itself
                logits_soft_cap=softcap, q_data_type=q.dtype, kv_data_type=k_cache.dtype, disable_split_kv=True,
            )  # fmt: skip
            thread.planned[kind] = step
        return wrapper


def _takes(q: Tensor, k_cache: Tensor, kv_lens: Tensor, sinks: Tensor) -> bool:
    """Whether FlashInfer takes the call, as far as this can be told without reading the metadata's values."""
    return (
        q.shape[0] > MEAN_ROWS * kv_lens.shape[0]
        and sinks.numel() == 0
        and q.shape[2] in HEAD_DIMS
        and q.dtype in DTYPES
        and k_cache.dtype == q.dtype
        and not _capturing(q)
    )


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _make_step(
    cu_q_lens: Tensor, kv_lens: Tensor, block_tables: Tensor, tree_mask: Tensor, num_rows: int, block_size: int
) -> _Step | None:
    B, M, device = kv_lens.shape[0], block_tables.shape[1], kv_lens.device
    values = torch.cat([cu_q_lens, kv_lens]).tolist()  # the host waits here
    starts, lengths = values[: B + 1], values[B + 1 :]
    widths = [end - start for start, end in pairwise(starts)]
    whole = starts[0] == 0 and starts[-1] == num_rows
    if not whole or not all(0 < width <= length for width, length in zip(widths, lengths, strict=True)):
        return None
    mask = None
    if tree_mask.numel():
        if sum(width * length for width, length in zip(widths, lengths, strict=True)) > MOST_MASK_ELEMENTS:
            return None
        mask = torch.cat([_allowed(tree_mask[s:e], n) for (s, e), n in zip(pairwise(starts), lengths, strict=True)])

    counts = [-(-length // block_size) for length in lengths]  # pages of each request
    kv_indptr = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    last_page_lens = torch.tensor([(length - 1) % block_size + 1 for length in lengths], dtype=torch.int32)
    owner = torch.repeat_interleave(torch.arange(B), torch.tensor(counts))  # [P]
    column = torch.arange(len(owner)) - kv_indptr[owner]  # [P]
    owner, column = owner.to(device), column.to(device)
    block = block_tables[owner, column.clamp(max=M - 1)]  # [P]
    request = torch.repeat_interleave(torch.arange(B), torch.tensor(widths))  # [T]
    ahead = torch.tensor([length - end for length, end in zip(lengths, starts[1:], strict=True)])  # [B]
    position = torch.arange(num_rows) + ahead[request]  # [T]
    return _Step(
        qo_indptr=torch.tensor(starts, dtype=torch.int32),
        kv_indptr=kv_indptr,
        last_page_lens=last_page_lens,
        pages=torch.where(column < M, block, 0).to(torch.int32),  # scratch block 0 where no column covers it
        kv_indptr_there=kv_indptr.to(device),
        last_page_lens_there=last_page_lens.to(device),
        requests=request.to(device, torch.int32),
        positions=position.to(device, torch.int32),
        mask=mask,
    )


def _allowed(tree_mask: Tensor, length: int) -> Tensor:
    """Packed masks [n, W] of a request's new rows -> [n * length] bool, with a row's keys next to each other.

    The new rows are the last n of the request's `length` tokens. Bit j of a row is new row j; older tokens are always
    seen.
    """
    n, W = tree_mask.shape
    index = torch.arange(length, device=tree_mask.device) - (length - n)  # [length] new row of each key, or negative
    word, bit = (index.clamp(min=0) // 32).clamp(max=W - 1), index.clamp(min=0) % 32
    return ((index < 0) | ((tree_mask[:, word] >> bit) & 1 == 1)).flatten()
