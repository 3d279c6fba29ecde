"""FlashInfer for machines without a GPU: its documented results, computed in plain torch from the arguments.

Each call is bound to the real signature. It asserts what arguments must be, where FlashInfer's own code would stop or
read past a tensor.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.contract.flashinfer_api import WRAPPER, signatures


class FlashInfer:
    """The part of the module that we call. calls: names and bound arguments of all calls, in order."""

    def __init__(self) -> None:
        self.signatures = signatures()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.sampling = SimpleNamespace(
            top_k_mask_logits=self._top_k_mask_logits, top_p_renorm_probs=self._top_p_renorm_probs
        )

    def bind(self, name: str, *arguments: Any, **keywords: Any) -> SimpleNamespace:
        bound = self.signatures[name].bind(*arguments, **keywords)
        bound.apply_defaults()
        self.calls.append((name, bound.arguments))
        return SimpleNamespace(**bound.arguments)

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    def append_paged_kv_cache(self, *arguments: Any, **keywords: Any) -> None:
        a = self.bind("append_paged_kv_cache", *arguments, **keywords)
        assert a.kv_layout == "NHD"
        for indices in (a.batch_indices, a.positions, a.kv_indices, a.kv_indptr, a.kv_last_page_len):
            assert indices.dtype == torch.int32
            assert indices.is_contiguous()
            assert indices.device == a.append_key.device
        assert a.batch_indices.shape == a.positions.shape == a.append_key.shape[:1]
        requests, positions = a.batch_indices.long(), a.positions.long()  # [T]
        for cache, rows in zip(a.paged_kv_cache, (a.append_key, a.append_value), strict=True):
            page = a.kv_indptr[requests] + positions // cache.shape[1]  # [T]
            assert (page < a.kv_indptr[requests + 1]).all()
            cache[a.kv_indices[page].long(), positions % cache.shape[1]] = rows

    def BatchPrefillWithPagedKVCacheWrapper(self, *arguments: Any, **keywords: Any) -> _Wrapper:
        return _Wrapper(self, *arguments, **keywords)

    def _top_k_mask_logits(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Mask the logits below the k-th largest."""
        a = self.bind("sampling.top_k_mask_logits", *arguments, **keywords)
        assert a.top_k.dtype == torch.int32
        assert ((a.top_k > 0) & (a.top_k <= a.logits.shape[1])).all()
        ranked = a.logits.sort(dim=1, descending=True).values
        kth = ranked.gather(1, a.top_k[:, None].long() - 1)
        return a.logits.masked_fill(a.logits < kth, float("-inf"))

    def _top_p_renorm_probs(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Set probabilities outside the top-p set to 0, and renormalise the rest.

        The set has the largest probabilities until their mass reaches p, and all that equal the smallest of them.
        """
        a = self.bind("sampling.top_p_renorm_probs", *arguments, **keywords)
        assert a.is_deterministic
        assert a.top_p.dtype == a.probs.dtype == torch.float32
        assert ((a.top_p > 0) & (a.top_p < 1)).all()
        ranked = a.probs.double().sort(dim=1, descending=True).values
        enough = ranked.cumsum(1) >= a.top_p[:, None]
        enough[:, -1] = True
        edge = ranked.gather(1, enough.int().argmax(1, keepdim=True))
        kept = a.probs.masked_fill(a.probs < edge, 0.0)
        return kept / kept.sum(1, keepdim=True)


class _Wrapper:
    def __init__(self, module: FlashInfer, *arguments: Any, **keywords: Any) -> None:
        self.module = module
        a = module.bind(f"{WRAPPER}.__init__", self, *arguments, **keywords)
        assert a.kv_layout == "NHD"
        assert a.backend == "fa2"  # fa3 takes no masks; "auto" goes on with its first choice
        assert not a.use_cuda_graph
        assert a.float_workspace_buffer.data_ptr() % 16 == 0

    def plan(self, *arguments: Any, **keywords: Any) -> None:
        p = self.module.bind(f"{WRAPPER}.plan", self, *arguments, **keywords)
        for indices in (p.qo_indptr, p.paged_kv_indptr, p.paged_kv_indices, p.paged_kv_last_page_len):
            assert indices.dtype == torch.int32
        assert len(p.qo_indptr) == len(p.paged_kv_indptr) == len(p.paged_kv_last_page_len) + 1
        assert ((p.paged_kv_last_page_len > 0) & (p.paged_kv_last_page_len <= p.page_size)).all()
        assert len(p.paged_kv_indices) == p.paged_kv_indptr[-1]
        self.planned = p
        self.q_lens = (p.qo_indptr[1:] - p.qo_indptr[:-1]).tolist()
        pages = p.paged_kv_indptr[1:] - p.paged_kv_indptr[:-1]
        self.kv_lens = ((pages - 1) * p.page_size + p.paged_kv_last_page_len).tolist()
        if p.custom_mask is not None:
            assert p.custom_mask.dtype == torch.bool
            assert not p.causal
            elements = sum(q * kv for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
            assert p.custom_mask.shape == (elements,)

    def run(self, *arguments: Any, **keywords: Any) -> Tensor:
        a, p = self.module.bind(f"{WRAPPER}.run", self, *arguments, **keywords), self.planned
        assert a.sinks is None  # ignored by fa2
        assert a.q.shape == a.out.shape == (p.qo_indptr[-1], p.num_qo_heads, p.head_dim_qk)
        k_cache, v_cache = a.paged_kv_cache
        assert k_cache.shape[1:] == v_cache.shape[1:] == (p.page_size, p.num_kv_heads, p.head_dim_qk)
        assert a.q.dtype == a.out.dtype == p.q_data_type
        assert k_cache.dtype == v_cache.dtype == p.kv_data_type
        masked = 0
        for b, (n, length) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            rows = slice(int(p.qo_indptr[b]), int(p.qo_indptr[b + 1]))
            blocks = p.paged_kv_indices[int(p.paged_kv_indptr[b]) : int(p.paged_kv_indptr[b + 1])].long()
            keys, values = (cache[blocks].flatten(0, 1)[:length].float() for cache in (k_cache, v_cache))
            row, key = torch.arange(n)[:, None], torch.arange(length)
            if p.custom_mask is not None:
                seen = p.custom_mask[masked : masked + n * length].view(n, length)
                masked += n * length
            else:
                seen = (key + n <= length + row) if p.causal else torch.ones(n, length, dtype=torch.bool)
            if p.window_left >= 0:
                seen = seen & (key + n + p.window_left >= length + row)
            a.out[rows] = self._attend(a.q[rows].float(), keys, values, seen).to(a.out.dtype)
        return a.out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """q [n, Hq, D], keys and values [S, Hkv, D], seen [n, S] -> [n, Hq, D]."""
        p, group = self.planned, q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("nhd,shd->hns", q, keys) * p.sm_scale
        if p.logits_soft_cap > 0:
            scores = p.logits_soft_cap * torch.tanh(scores / p.logits_soft_cap)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hns,shd->nhd", weights, values)
