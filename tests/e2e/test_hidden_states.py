"""SAVE_HIDDEN_STATES: files hold the states that the target computed, and lost finished requests are reported."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.e2e.tiny import VOCAB, add_tokenizer, assert_all_blocks_free, make_target
from tests.e2e.training import make_training_batch
from trtspec import LLM, SamplingParams
from trtspec.cli import main
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, ConfigError, EngineError
from trtspec.interop.decoding_configs import SaveHiddenStatesDecodingConfig
from trtspec.methods.eagle3.train import new_head
from trtspec.methods.hidden_states import shards as hidden_shards
from trtspec.methods.hidden_states.shards import ShardReader, States, shards_of
from trtspec.models.weights import load_decoder
from trtspec.outputs import RequestOutput
from trtspec.train.shards import ShardBatches
from trtspec.train.training_batches import best_ids
from trtspec.train.unrolled import HeadLoss

LAYERS = (0, 2, 3)
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
SMALL = {"max_num_tokens": 7, "max_batch_size": 6, "num_kv_blocks": 40, "block_size": 4}
PROMPTS = [[(7 * i + j) % VOCAB for j in range(3 + 5 * i)] for i in range(7)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of five layers, so that some layers are not captured, the last one among them."""
    folder = make_target(tmp_path_factory.mktemp("states"), num_hidden_layers=5, max_position_embeddings=512)
    add_tokenizer(folder)
    return folder


def save(model: Path, out: Path, write_interval: int = 3, layers: Sequence[int] = LAYERS, **engine: Any) -> LLM:
    config = SaveHiddenStatesDecodingConfig(
        output_directory=str(out), write_interval=write_interval, eagle3_layers_to_capture=list(layers)
    )
    return LLM(model, config, dtype="float32", **engine)


def saved(out: Path) -> list[States]:
    """The states of all requests of all shards, in order."""
    readers = [ShardReader(path) for path in shards_of(out)]
    return [reader.rows(i, 0, length) for reader in readers for i, length in enumerate(reader.lengths)]


def texts_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Prompt and output of every sample without its last token, which has no row."""
    return sorted([*output.prompt_token_ids, *sample.token_ids][:-1] for output in outputs for sample in output.outputs)


# -- what is saved ----------------------------------------------------------------------------------------------------


def test_saved_states_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    """Saved states are those of transformers.

    There are chunked prompts, mixed batches, preemption and two samples of each prompt.
    """
    params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    with save(model, tmp_path, layers=(*LAYERS, -1), **SMALL) as llm:
        outputs = llm.generate(PROMPTS, params)
        metrics = llm.get_metrics()
        assert_all_blocks_free(llm)
    assert metrics.preemptions > 0
    assert metrics.speculation.num_draft_tokens == 0
    found = saved(tmp_path)
    assert sorted(states.input_ids.tolist() for states in found) == texts_of(outputs)
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for states in found:
        with torch.no_grad():
            theirs = oracle(states.input_ids[None], output_hidden_states=True).hidden_states
        after = [theirs[i + 1][0] for i in LAYERS] + [theirs[-1][0]]  # the first entry is the embedding
        torch.testing.assert_close(states.hidden_states, torch.cat(after, dim=-1), atol=1e-4, rtol=0)
        torch.testing.assert_close(states.last_hidden_state, theirs[-1][0], atol=1e-4, rtol=0)


def test_text_is_that_of_plain_decoding(model: Path, tmp_path: Path) -> None:
    with LLM(model, dtype="float32") as llm:
        plain = llm.generate(PROMPTS, PARAMS)
    with save(model, tmp_path) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    assert texts_of(outputs) == texts_of(plain)


def test_a_prompt_that_was_there_before_is_computed_again(model: Path, tmp_path: Path) -> None:
    with save(model, tmp_path, block_size=4) as llm:
        for _ in range(2):
            llm.generate([PROMPTS[-1]], PARAMS)
        assert llm.get_metrics().prefix_hit_tokens == 0
    first, second = saved(tmp_path)
    assert torch.equal(first.hidden_states, second.hidden_states)
    assert len(first.input_ids) == len(PROMPTS[-1]) + 11


def test_a_stop_string_ends_the_rows_where_the_text_ends(model: Path, tmp_path: Path) -> None:
    with save(model, tmp_path) as llm:
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, stop=["a", "b", "c", "d"])
        outputs = llm.generate(PROMPTS, params)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    assert sorted(states.input_ids.tolist() for states in saved(tmp_path)) == texts_of(outputs)


def test_states_have_the_targets_dtype(model: Path, tmp_path: Path) -> None:
    spec = {"method": "extract_hidden_states", "output_directory": str(tmp_path), "capture_layers": [1]}
    with LLM(model, spec, dtype="bfloat16") as llm:
        llm.generate(PROMPTS[:1], PARAMS)
    (states,) = saved(tmp_path)
    assert states.hidden_states.dtype == states.last_hidden_state.dtype == torch.bfloat16
    assert states.hidden_states.shape == states.last_hidden_state.shape == (14, 32)
    assert ShardReader(shards_of(tmp_path)[0]).metadata.dtype == "bfloat16"


def test_aborted_requests_are_not_saved(model: Path, tmp_path: Path) -> None:
    with save(model, tmp_path) as llm:
        aborted = llm.generate_async(PROMPTS[3], SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in aborted:
            break  # leaving early aborts
        outputs = llm.generate(PROMPTS[:2], PARAMS)
    assert sorted(states.input_ids.tolist() for states in saved(tmp_path)) == texts_of(outputs)


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_shard_every_interval_and_the_rest_on_shutdown(model: Path, tmp_path: Path) -> None:
    with save(model, tmp_path) as llm:
        llm.generate(PROMPTS, PARAMS)
        assert [path.name for path in shards_of(tmp_path)] == ["data-00000.safetensors", "data-00001.safetensors"]
        assert llm.get_metrics().saved_requests == 6
    assert [len(ShardReader(path).lengths) for path in shards_of(tmp_path)] == [3, 3, 1]
    assert {path.stat().st_mode & 0o777 for path in shards_of(tmp_path)} == {0o644}
    metadata = hidden_shards.ShardMetadata.of(shards_of(tmp_path)[0])
    assert metadata == (hidden_shards.ShardMetadata(LAYERS, 32, "float32"), 3)


def test_flush_writes_what_waits_and_generation_goes_on(model: Path, tmp_path: Path) -> None:
    with save(model, tmp_path) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
        llm.engine.flush()
        assert len(saved(tmp_path)) == llm.get_metrics().saved_requests == 1
        llm.engine.flush()
        llm.generate(PROMPTS[:1], PARAMS)
    assert [len(ShardReader(path).lengths) for path in shards_of(tmp_path)] == [1, 1]


def test_a_forgotten_engine_writes_what_waits(model: Path, tmp_path: Path) -> None:
    llm = save(model, tmp_path)
    llm.generate(PROMPTS[:2], PARAMS)
    del llm
    gc.collect()
    assert len(saved(tmp_path)) == 2


def test_a_new_run_goes_on_numbering_and_removes_leftovers(model: Path, tmp_path: Path) -> None:
    with save(model, tmp_path) as llm:
        llm.generate(PROMPTS[:4], PARAMS)
    before = {path.name: path.read_bytes() for path in shards_of(tmp_path)}
    (tmp_path / "data-00002.safetensors.tmp").write_bytes(b"torn by a kill")
    with save(model, tmp_path) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
    names = ["data-00000.safetensors", "data-00001.safetensors", "data-00002.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert len(saved(tmp_path)) == 5


def test_a_leftover_that_cannot_be_removed_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "data-00000.safetensors.tmp").mkdir()
    with pytest.raises(ConfigError, match=r"data-00000.safetensors.tmp, which was never finished, cannot be removed"):
        save(model, tmp_path)


def test_a_folder_of_other_states_is_refused(model: Path, tmp_path: Path) -> None:
    with save(model, tmp_path / "out") as llm:
        llm.generate(PROMPTS[:1], PARAMS)
    with pytest.raises(ConfigError, match=r"data-00000.safetensors with ShardMetadata\(capture_layers=\(0, 2, 3\)"):
        save(model, tmp_path / "out", layers=(0, 2))
    wide = make_target(tmp_path, num_hidden_layers=5, hidden_size=64, name="wide")
    with pytest.raises(ConfigError, match=r"hidden_size=32.*hidden_size=64.*use another folder"):
        save(wide, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds no hidden states"):
        save(model, model)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        save(model, tmp_path / "file")


def test_a_folder_in_use_is_refused(model: Path, tmp_path: Path) -> None:
    with save(model, tmp_path), pytest.raises(ConfigError, match="another engine writes there"):
        save(model, tmp_path)
    save(model, tmp_path).shutdown()


def test_a_damaged_shard_is_named(model: Path, tmp_path: Path) -> None:
    with save(model, tmp_path) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
    (shard,) = shards_of(tmp_path)
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"data-00000.safetensors cannot be read"):
        ShardReader(shard)
    save_file({"x": torch.zeros(1)}, shard, hidden_shards.ShardMetadata(LAYERS, 32, "float32").as_metadata(1))
    with pytest.raises(CheckpointError, match="does not hold the tensors of 1 requests"):
        ShardReader(shard)


# -- disks ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_no_shard_and_no_text(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = True

    def write(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        if full and shards_of(tmp_path):
            path.write_bytes(b"the first half")
            assert path not in shards_of(tmp_path)  # a kill now leaves nothing that looks finished
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(hidden_shards, "save_file", write)
    llm = save(model, tmp_path)
    outputs = llm.generate(PROMPTS, PARAMS)
    outputs += llm.generate(PROMPTS, PARAMS)
    assert {sample.finish_reason for output in outputs for sample in output.outputs} == {"length"}
    assert [path.name for path in tmp_path.iterdir()] == ["data-00000.safetensors"]
    first = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(first) == 1  # once, though it was tried many times
    assert "EngineError: hidden states cannot be written" in first[0]
    assert "No space left" in first[0]
    metrics = llm.get_metrics()
    assert (metrics.saved_requests, metrics.save_error in first[0]) == (3, True)
    with pytest.raises(EngineError, match=r"of 6 requests are lost and 5 still wait, 3 are saved"):
        llm.engine.flush()  # of the 14, the last 2 would have waited in any case
    full = False
    with pytest.raises(EngineError, match=r"of 6 requests are lost and 0 still wait, 8 are saved"):
        llm.shutdown()
    assert len(saved(tmp_path)) == 8
    llm.shutdown()


@pytest.mark.long
def test_a_real_write_that_fails(model: Path, tmp_path: Path) -> None:
    """A write that really fails loses no shard. A limit on file sizes stands for the full disk.

    The interpreter ends without shutdown().
    """
    script = f"""
        import os, resource
        from trtspec import LLM, SamplingParams
        from trtspec.errors import EngineError
        out, prompts = {str(tmp_path)!r}, {PROMPTS}
        spec = dict(method="extract_hidden_states", output_directory=out, write_interval=3, capture_layers=[0])
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        llm = LLM({str(model)!r}, spec)
        llm.generate(prompts[:3], params)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        llm.generate(prompts[3:6], params)
        assert os.listdir(out) == ["data-00000.safetensors"], os.listdir(out)
        try:
            llm.engine.flush()
        except EngineError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        llm.generate(prompts[6:], params)
        assert os.listdir(out) == ["data-00000.safetensors"], os.listdir(out)
        print("end")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, end = done.stdout.splitlines()[-2:]
    assert told.startswith("hidden states of 0 requests are lost and 3 still wait, 3 are saved")
    assert end == "end"
    assert len(saved(tmp_path)) == 7


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_batches_from_shards_equal_those_from_text(model: Path, tmp_path: Path) -> None:
    """Training batches from shards equal those from text.

    Each request is one window long, so that a window has seen nothing before it, in either case.
    """
    seq = 24
    params = [
        SamplingParams(temperature=1.0, seed=5, max_tokens=seq + 1 - len(p), ignore_eos=True) for p in PROMPTS[:4]
    ]
    with save(model, tmp_path, write_interval=2) as llm:
        outputs = llm.generate(PROMPTS[:4], params)
    target = load_decoder(ModelConfig.from_folder(model), torch.float32).train()
    shards = ShardBatches([ShardReader(path) for path in shards_of(tmp_path)], seq, 4, 0, target)
    training_batch = shards.batch(0)
    assert sorted(training_batch.inputs.tolist()) == texts_of(outputs)
    theirs = make_training_batch(target, LAYERS, training_batch.inputs)
    for name in ("places", "taught", "best", "captured", "last"):
        torch.testing.assert_close(getattr(training_batch, name), getattr(theirs, name), atol=1e-4, rtol=0)
    torch.manual_seed(0)
    head = new_head(target, LAYERS, torch.arange(VOCAB))
    loss = HeadLoss(head, target, 3, torch.float32)
    ours, from_text = loss(*training_batch), loss(*theirs)
    torch.testing.assert_close(ours, from_text, atol=1e-4, rtol=0)


def test_an_epoch_of_windows_has_every_row_once(model: Path, tmp_path: Path) -> None:
    with save(model, tmp_path, write_interval=2) as llm:
        llm.generate(PROMPTS, PARAMS)
    seq, readers = 15, [ShardReader(path) for path in shards_of(tmp_path)]
    requests = saved(tmp_path)
    lengths = [len(states.input_ids) for states in requests]
    assert sorted(lengths) == [14, 19, 24, 29, 34, 39, 44]
    rows = {states.numpy().tobytes(): i for i, states in enumerate(torch.cat([r.hidden_states for r in requests]))}
    ids, last = torch.cat([r.input_ids for r in requests]), torch.cat([r.last_hidden_state for r in requests])
    assert len(rows) == sum(lengths) == 203
    first = {sum(lengths[:i]) for i in range(7)}
    target = load_decoder(ModelConfig.from_folder(model), torch.float32).train()
    shards = ShardBatches(readers, seq, 3, 0, target)
    orders = set()
    for epoch in range(6):
        seen = []
        for index in range(4 * epoch, 4 * epoch + 4):  # 13 windows make 4 batches
            training_batch = shards.batch(index)
            assert torch.equal(training_batch.best, best_ids(target, training_batch.last))
            for window in zip(*training_batch, strict=True):
                inputs, places, taught, _, captured, lasts = window
                own = [rows[state.numpy().tobytes()] for state in captured]
                assert torch.equal(inputs, ids[own])
                assert torch.equal(lasts, last[own])
                assert bool(taught.all())
                for place, row, before in zip(places.tolist(), own, [-1, *own], strict=False):
                    assert place == 0 if before != row - 1 or row in first else place > 0
                steps = [b - a for a, b in zip(places.tolist(), places.tolist()[1:], strict=False)]
                assert all(step == 1 for step, place in zip(steps, places.tolist()[1:], strict=True) if place)
                seen += own
        assert len(set(seen)) == len(seen) == 4 * 3 * seq
        orders.add(tuple(seen))
    assert len(orders) == 6  # cut anew in every epoch
    again = ShardBatches(readers, seq, 3, 0, target)
    assert all(torch.equal(a, b) for a, b in zip(again.batch(7), shards.batch(7), strict=True))


def test_train_eagle3_on_shards(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, head = tmp_path / "states", tmp_path / "head"
    with save(model, out) as llm:
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    base = ["train", "eagle3", "--target", str(model), "--out", str(head), "--steps", "4", 
            "--seq-len", "24", "--batch-size", "2", "--unroll", "3", "--dtype", "float32"]  # fmt: skip
    assert main([*base, "--data", str(out)]) == 0
    config = json.loads((head / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [i + 1 for i in LAYERS]
    assert load_file(head / "model.safetensors")["fc.weight"].shape == (32, 3 * 32)
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with LLM(model, spec) as llm:
        assert llm.generate(PROMPTS[:1], PARAMS)[0].outputs[0].finish_reason == "length"

    (tmp_path / "text").write_text("ab" * 100)
    bad = {
        "leave it unset": ["--data", str(out), "--capture-layers", "1,2"],
        "train on one kind": ["--data", str(out), str(tmp_path / "text")],
        "make 0 windows of seq_len=400": ["--data", str(out), "--seq-len", "400"],
        "holds no hidden states": ["--data", str(model)],
    }
    for number, (message, arguments) in enumerate(bad.items()):
        assert main([*base, "--run", str(tmp_path / f"run{number}"), *arguments]) == 1
        assert message in capsys.readouterr().err
