"""One-engine steps of a draft head, launched by hand, for tests that compare every pass with an oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor

from trtspec.core import AttnMetadata, KVLayer, SamplingTensors, SpecMetadata, StepInputs, StepOutputs
from trtspec.kv.groups import with_group_tables
from trtspec.kv.pool import allocate_layers
from trtspec.methods.step import OneEngineStep
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import PagedAttend
from trtspec.models.decoder import Decoder
from trtspec.modes import SpeculativeDecodingMode
from trtspec.sampling_params import RequestSampling

GREEDY = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def states(target: transformers.PreTrainedModel, tokens: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return transformers' residual streams after `layers`, next to each other [n, len * Ht], and its logits [n, V].

    Layer -1 is the stream after the last norm, which transformers returns as the last of `hidden_states`. It does not
    return the stream before that norm, so a hook catches that where it enters the norm.
    """
    caught: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    with torch.no_grad():
        out = target(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
    hook.remove()
    after = [*out.hidden_states[1:-1], caught[0], out.hidden_states[-1]]
    return torch.cat([after[i][0] for i in layers], dim=-1), out.logits[0]


class Watching(SpecWorker):
    """A worker that keeps the outputs of every pass; a mixin for any worker of a head."""

    def reset(self) -> None:
        self.first: Tensor = torch.empty(0)
        self.rows: list[Tensor] = []  # y [B, H] of each pass
        self.scores: list[Tensor] = []  # logits [B, Vd] of each pass

    def first_pass(
        self,
        next_ids: Tensor,
        captured: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run the pass, and one that returns all rows, which has the same bits and writes the same KV."""
        copies = dataclasses.replace(attend, kv=[tuple(cache.clone() for cache in layer) for layer in attend.kv])
        self.first = super().first_pass(next_ids, captured, positions, copies)
        drafting = super().first_pass(next_ids, captured, positions, attend, rows)
        assert rows is not None
        assert torch.equal(drafting, self.first[rows])
        for layer, copy in zip(attend.kv, copies.kv, strict=True):
            assert all(torch.equal(cache, other) for cache, other in zip(layer, copy, strict=True))
        return drafting

    def draft_logits(self, step: int, hidden: Tensor) -> Tensor:
        self.rows.append(hidden)
        self.scores.append(super().draft_logits(step, hidden))
        return self.scores[-1]


@dataclass
class Session:
    """A one-engine step and a paged cache of small, scattered blocks, one table per request."""

    step: OneEngineStep
    kv: list[KVLayer]
    tables: list[list[int]]
    known: list[list[int]]  # tokens of each request
    committed: list[int] = field(default_factory=list)
    group_tables: list[list[list[int]]] = field(default_factory=list)  # of KV groups after the first; []: `tables`

    @property
    def worker(self) -> Watching:
        assert isinstance(self.step.worker, Watching)
        return self.step.worker

    @torch.no_grad()
    def launch(self, drafts: list[list[int]], next_draft_len: int | None = None) -> StepOutputs:
        """Launch all requests at once: first their prompts, later one known token and these drafts for each.

        The accepted tokens are committed. next_draft_len: number of drafts to make, None = as many as the worker can.
        """
        B, contexts = len(self.known), not self.committed
        starts = self.committed or [0] * B
        rows = [[*known[start:], *own] for known, start, own in zip(self.known, starts, drafts, strict=True)]
        attn = AttnMetadata.of(
            [len(r) for r in rows], [s + len(r) for s, r in zip(starts, rows, strict=True)], self.tables
        )
        if self.group_tables:
            attn = with_group_tables(attn, self.step.kv_groups, self.group_tables)
        width = 1 if contexts else len(drafts[0]) + 1
        ends = attn.cu_q_lens[1:].tolist()
        draws = [len(known) + j for known in self.known for j in range(width)]
        spec = dataclasses.replace(
            SpecMetadata.plain(range(B), attn, SamplingTensors.of([GREEDY] * len(draws), draws)),
            spec_dec_mode=SpeculativeDecodingMode.EAGLE3_ONE_MODEL,
            max_draft_len=self.worker.max_draft_len,
            next_draft_len=self.worker.max_draft_len if next_draft_len is None else next_draft_len,
            gather_ids=torch.tensor([end - width + j for end in ends for j in range(width)]),
            draft_tokens=torch.tensor([] if contexts else drafts, dtype=torch.int64).view(
                0 if contexts else B, width - 1
            ),
            draft_lens=torch.full((B,), width - 1, dtype=torch.int32),
        )
        self.worker.reset()
        outputs = self.step(StepInputs(torch.tensor([t for r in rows for t in r]), attn, spec), self.kv)
        assert outputs.verdict is not None
        assert outputs.next_kv_lens is not None
        for known, new, count in zip(
            self.known, outputs.verdict.tokens.tolist(), outputs.verdict.num_tokens.tolist(), strict=True
        ):
            known += new[:count]
        self.committed = outputs.next_kv_lens.tolist()
        return outputs


def open_session(decoder: Decoder, worker: SpecWorker, prompts: list[list[int]]) -> Session:
    """Open a session with these prompts; `worker` is a Watching."""
    blocks = 1 + sum(-(-(len(p) + 40) // 4) for p in prompts)
    kv = allocate_layers([*decoder.spec.kv_layers, *worker.kv_layers], blocks, 4, torch.float32)
    free = iter((torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist())
    tables = [[next(free) for _ in range(-(-(len(p) + 40) // 4))] for p in prompts]
    return Session(OneEngineStep(decoder, worker), kv, tables, [list(p) for p in prompts])


def told(target: transformers.PreTrainedModel, known: list[int], right: int, num_drafts: int) -> list[int]:
    """Return drafts of which exactly the first `right` are the tokens that the target will choose."""
    tokens = list(known)
    for _ in range(right + 1):
        with torch.no_grad():
            tokens.append(int(target(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    wrong = (tokens[-1] + 1) % target.config.vocab_size
    return [*tokens[len(known) : -1], wrong, *range(5, 5 + num_drafts)][:num_drafts]


def assert_close(got: Tensor, want: Tensor, atol: float = 1e-5) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0.0, atol=atol)
