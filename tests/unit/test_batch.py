"""The packed inputs of a step equal those made from scratch, whatever the builder keeps from step to step.

Loads of random requests run through the scheduler, with random verdicts, drafts, arrivals, aborts and preemptions. At
every step, the test compares the builder, which has seen all steps before, with a construction that keeps nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from trtspec.core import AttnMetadata, SamplingTensors, StepInputs
from trtspec.engine.batch import InputBuilder
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch, Scheduler
from trtspec.kv import rewind
from trtspec.kv.blocks import BlockAllocator
from trtspec.kv.reuse import PrefixReuse
from trtspec.modes import SpeculativeDecodingMode
from trtspec.sampling_params import RequestSampling

STOP = 2


def plainly(batch: Batch, next_draft_len: int, forced: int, graphs: tuple[int, ...]) -> dict[str, Tensor]:
    """The tensors of a step, by name, built row by row."""
    K = max(row.draft_len for row in batch)
    K = next((length for length in graphs if length >= max(K, next_draft_len)), K)
    attn = AttnMetadata.of(
        [row.num_rows for row in batch], [row.end for row in batch], [row.request.kv.blocks for row in batch]
    )
    ids, gather, draws, owners, drafts = [], [], [], [], []
    for row in batch:
        request, start = row.request, row.request.kv.committed
        first = len(ids) - start  # packed row of the request's token 0
        ids += (request.tokens + request.drafts)[start : row.end]
        last = row.end - 1 - row.draft_len  # position of the last token that is not a draft
        nth = range(row.draft_len + 1)
        gather += [first + last + j for j in nth]
        draws += [last + 1 + j for j in nth]
        owners += [request.sampling] * len(nth)
        if not row.is_context:
            drafts.append([ids[first + last + min(1 + j, row.draft_len)] for j in range(K)])  # junk after its drafts
    sampling = SamplingTensors.of(owners, draws)
    return {
        "input_ids": torch.tensor(ids),
        "cu_q_lens": attn.cu_q_lens,
        "kv_lens": attn.kv_lens,
        "block_tables": attn.block_tables,
        "seq_lens": torch.tensor([row.num_rows for row in batch], dtype=torch.int32),
        "gather_ids": torch.tensor(gather),
        "draft_tokens": torch.tensor(drafts, dtype=torch.int64).view(len(drafts), K),
        "draft_lens": torch.tensor([row.draft_len for row in batch], dtype=torch.int32),
        "next_prompt_token": torch.tensor([-1 if row.emits else row.request.tokens[row.end] for row in batch]),
        "forced_accept": torch.tensor([-1 if row.is_context else forced for row in batch], dtype=torch.int32),
        **{field.name: getattr(sampling, field.name) for field in fields(SamplingTensors)},
    }


def tensors_in(inputs: StepInputs) -> dict[str, Tensor]:
    """The same tensors, taken from a step's inputs. Block tables lose the scratch columns at their end."""
    parts = (inputs, inputs.attn, inputs.spec, inputs.spec.sampling)
    tensors = {f.name: getattr(part, f.name) for part in parts for f in fields(part)}
    tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    tensors.pop("tree_mask")
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    tables = tensors["block_tables"]
    used = int(tables.any(0).sum())
    assert not tables[:, used:].any()
    return {**tensors, "block_tables": tables[:, :used]}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


class Load:
    """A random scheduler, its requests, and a builder that has seen every step."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.K = rng.choice((0, 1, 3, 5))
        self.allocator = BlockAllocator(rng.randint(8, 60), rng.choice((1, 2, 4)))
        reuse = PrefixReuse(self.allocator) if rng.random() < 0.5 else None
        batch = rng.randint(1, 6)
        self.scheduler = Scheduler(self.allocator, batch, batch * (self.K + 1) + rng.choice((0, 10)), self.K, reuse)
        self.graphs = rng.choice(((), (0, self.K), (self.K,)))
        self.forced = rng.choice((-1, -1, 0, 1))
        self.builder = InputBuilder(SpeculativeDecodingMode.NGRAM, self.K, self.forced, self.graphs)
        self.draft_chance = rng.choice((0.0, 0.5, 1.0))  # chance that a proposal has its greatest length
        self.greedy = rng.random() < 0.5
        self.number = 0
        self.seen: Counter[str] = Counter()

    def submit(self) -> None:
        """Submit a prompt with one or more samples. Prompts begin alike, so that requests share blocks."""
        length = self.rng.randint(1, self.allocator.capacity - 1)
        tokens = [self.rng.choice((3, 3, 3, 4)) for _ in range(length)]
        limit = self.rng.randint(length + 1, self.allocator.capacity)
        samples = []
        for _ in range(self.rng.choice((1, 1, 3))):
            sampling = RequestSampling(
                greedy=self.greedy or self.rng.random() < 0.5,
                temperature=self.rng.choice((0.5, 1.0)),
                top_k=self.rng.choice((0, 5)),
                top_p=self.rng.choice((1.0, 0.9)),
                min_p=self.rng.choice((0.0, 0.1)),
                seed=self.number,
                ban_ids=self.rng.choice(((), (STOP,), (5, 6))),
                ban_until=self.number,
            )
            samples.append(
                Request(
                    request_id=self.number,
                    tokens=list(tokens),
                    prompt_len=length,
                    sampling=sampling,
                    length_limit=limit,
                    min_tokens=0,
                    eos_ids=frozenset({STOP}),
                    stop_token_ids=frozenset(),
                    include_stop=False,
                    text=None,
                )
            )
            self.number += 1
        self.scheduler.add(samples[0], samples[1:])

    def step(self) -> None:
        """Run one step. Its inputs must be right, and those of the previous step unchanged."""
        batch = self.scheduler.schedule()
        if not batch:
            return
        self.launch(batch)
        if self.rng.random() < 0.05 and len(batch) > 1:  # as if a launch had failed: launch its halves
            self.launch(batch[: len(batch) // 2])
            self.launch(batch[len(batch) // 2 :])
        self.seen["steps"] += 1
        self.seen["same layout"] += (batch,) == self.latest[-1:]
        self.seen["earlier layout"] += batch in self.latest[:-1]
        self.latest = (*self.latest[-5:], batch)
        for row in batch:
            self.finish(row.request, row.num_rows, row.draft_len, row.emits)

    latest: tuple[Batch, ...] = ()
    before: tuple[StepInputs, dict[str, Tensor]] | None = None

    def launch(self, batch: Batch) -> None:
        wanted = self.rng.choice((0, self.K))
        inputs = self.builder.build(batch, wanted)
        expected = plainly(batch, wanted, self.forced, self.graphs)
        assert_same(tensors_in(inputs), expected)
        assert inputs.spec.next_draft_len == wanted
        assert inputs.spec.request_ids == tuple(row.request.request_id for row in batch)
        if self.before is not None:
            assert_same(tensors_in(self.before[0]), self.before[1])
        self.before = inputs, expected

    def finish(self, request: Request, num_rows: int, draft_len: int, emits: bool) -> None:
        """Apply a random verdict, then a random proposal."""
        count = self.rng.randint(1, draft_len + 1) if emits else 0
        tokens = [STOP if self.rng.random() < 0.03 else self.rng.randrange(3, 6) for _ in range(count)]
        rewind.commit(request.kv, num_rows, count, draft_len)
        request.drafts = []
        request.append(tokens)
        self.scheduler.release_siblings(request)
        if request.finished:
            self.scheduler.remove(request)
        elif count:
            reserved = len(request.kv.blocks) * self.allocator.block_size
            length = len(request.tokens)
            most = max(min(self.K, request.length_limit - length - 1, reserved - length + 1), 0)
            if self.rng.random() >= self.draft_chance:
                most = self.rng.randint(0, most)
            request.drafts = [self.rng.randrange(3, 6) for _ in range(most)]

    def abort(self) -> None:
        request = self.rng.choice(list(self.scheduler.running))
        request.abort()
        self.scheduler.remove(request)


@pytest.mark.parametrize("block_of_seeds", [0, 1, *(pytest.param(i, marks=pytest.mark.long) for i in (2, 3))])
def test_inputs_are_those_made_from_scratch(block_of_seeds: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block_of_seeds * 12, block_of_seeds * 12 + 12):
        load = Load(seed)
        for _ in range(120):
            event = load.rng.random()
            if event < 0.1 or not load.scheduler.has_work:
                load.submit()
            elif event < 0.13 and load.scheduler.running:
                load.abort()
            elif event < 0.16 and load.scheduler.running:
                load.scheduler._preempt(load.rng.choice(load.scheduler.running))
            else:
                load.step()
        seen += load.seen
        seen["preemptions"] += load.scheduler.num_preemptions
        load.allocator.check(load.scheduler.live())
    assert min(seen["same layout"], seen["earlier layout"], seen["preemptions"]) > 50, seen
    assert seen["steps"] > 1000


def test_lengths_that_come_again_have_their_layout_again() -> None:
    """One request has K + 1 layouts; eight are kept, with two sets of tensors each."""
    load = Load(0)
    load.submit()
    batch = load.scheduler.schedule()
    (row,) = batch
    batches = [(row._replace(num_rows=n),) for n in range(1, 10)]
    tensors = {load.builder.build(one).spec.gather_ids for one in batches * 3}
    assert len(tensors) == 9 * 3  # the ninth takes the place of the first, and so on
    tensors = {load.builder.build(one).spec.gather_ids for one in batches[:8] * 3}
    assert len(tensors) == 8


def test_other_numbers_of_drafts_keep_what_the_same_requests_share() -> None:
    load = Load(0)
    load.submit()
    (row,) = load.scheduler.schedule()
    frames = []
    for num_rows in (1, 2):
        load.builder.build((row._replace(num_rows=num_rows),))
        assert load.builder._frame is not None
        frames.append(load.builder._frame)
    first, second = frames
    assert second.layout is not first.layout
    assert second.layout.members is first.layout.members
    assert second.num_blocks == first.num_blocks == [len(row.request.kv.blocks)]
    assert second.tables is not first.tables  # a step in flight keeps its own


def test_a_tensor_written_through_numpy_has_a_new_version() -> None:
    """A write through numpy raises the version of a tensor, even if its values stay the same.

    The attention reference keeps what it derives from lengths and block tables only as long as these are the same.
    """
    load = Load(0)
    load.submit()
    batch = load.scheduler.schedule()
    first = load.builder.build(batch)
    version = first.attn.kv_lens._version
    load.builder.build(batch)
    again = load.builder.build(batch)
    assert again.attn.kv_lens is first.attn.kv_lens
    assert again.attn.kv_lens._version > version


def test_runs_in_inference_mode() -> None:
    load = Load(0)
    load.submit()
    batch = load.scheduler.schedule()
    with torch.inference_mode():
        for _ in range(3):
            load.builder.build(batch)
    assert_same(tensors_in(load.builder.build(batch)), plainly(batch, 0, load.forced, load.graphs))
