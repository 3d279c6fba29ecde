"""Files that llama.cpp's own converter and quantiser write, of a random Llama and a random Qwen3.

`make contract-smollm2` sets LLAMA_PYTHON to a Python with llama-cpp-python, and LLAMA_SOURCE to llama.cpp's sources.
The folder `packages` in the sources has what llama.cpp's converter imports. TRTSPEC_SMOLLM2 is the file with the
tokenizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from tests.checkpoints import edit_config, make_checkpoint
from tests.models.test_logits_vs_transformers import Paged
from trtspec import LLM, SamplingParams
from trtspec.build.convert import convert
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.gguf.names import KEPT_BITS, hf_name
from trtspec.hub.folders import checkpoint_folder
from trtspec.models.weights import load_decoder

FILE, LLAMA, SOURCE = (os.environ.get(name, "") for name in ("TRTSPEC_SMOLLM2", "LLAMA_PYTHON", "LLAMA_SOURCE"))
pytestmark = pytest.mark.skipif(not (FILE and LLAMA and SOURCE), reason="needs what `make contract-smollm2` gets")

KINDS = ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K")
HEADS, KV_HEADS = 4, 2
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 49152}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with SmolLM2's tokenizer, which the converter knows; its GGUF file is next to it."""
    folder = make_checkpoint(tmp_path_factory.mktemp("llama"), request.param, "bfloat16", **SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint_folder(FILE) / name, folder / name)
    script, environment = Path(SOURCE) / "convert_hf_to_gguf.py", {**os.environ, "PYTHONPATH": f"{SOURCE}/packages"}
    options = ["--outfile", str(folder.parent / "BF16.gguf"), "--outtype", "bf16"]
    subprocess.run([sys.executable, str(script), str(folder), *options], env=environment, check=True)
    return folder


def file_of(original: Path, kind: str) -> Path:
    file = original.parent / f"{kind}.gguf"
    if not file.is_file():
        script = Path(__file__).with_name("llama_quantize.py")
        subprocess.run([LLAMA, str(script), str(original.parent / "BF16.gguf"), str(file), kind], check=True)
    return file


def dequantised(file: Path) -> dict[str, np.ndarray]:
    """Return gguf's dequantised weights, under Hugging Face's names and in its order of rows."""
    found = {}
    for stored in gguf.GGUFReader(file).tensors:
        values = gguf.dequantize(stored.data, stored.tensor_type)
        heads = HEADS if "attn_q." in stored.name else KV_HEADS if "attn_k." in stored.name else None
        if heads is not None and is_llama(file):
            values = turned(values, heads)
        found[str(hf_name(stored.name))] = np.ascontiguousarray(values)
    return found


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Change llama.cpp's order of rows, in which neighbours are rotated together, to Hugging Face's."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def is_llama(file: Path) -> bool:
    return gguf.GGUFReader(file).fields["general.architecture"].contents() == "llama"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_logits(original: Path, tmp_path: Path, kind: str) -> None:
    """Weights are gguf's bit for bit, and fp32 logits of 200 tokens are transformers' on these weights within 1e-3."""
    file = file_of(original, kind)
    folder = convert(file, tmp_path / "hf", "float32")
    ours, theirs = load_file(folder / "model.safetensors"), dequantised(file)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert np.array_equal(ours[name].numpy().view(np.int32), values.view(np.int32)), name
    ids = torch.randint(0, 49152, (200,), generator=torch.Generator().manual_seed(0))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = oracle(ids[None]).logits[0]
    decoder = load_decoder(ModelConfig.from_folder(folder if kind in KEPT_BITS else file), torch.float32)
    found = Paged(decoder, 1).step({0: ids.tolist()})[0]
    assert (found - expected).abs().max().item() < 1e-3


def ids_of(model: Path, dtype: str) -> list[list[int]]:
    prompts = torch.randint(3, 49152, (4, 20), generator=torch.Generator().manual_seed(1)).tolist()
    llm = LLM(model, dtype=dtype, backend="eager", max_seq_len=128, max_batch_size=4)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), False)
    llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_bf16_file_gives_the_checkpoint_s_text(original: Path) -> None:
    assert ids_of(file_of(original, "BF16"), "auto") == ids_of(original, "auto")


@pytest.mark.parametrize("kind", KEPT_BITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_integers_that_are_kept_give_the_text_of_the_same_integers(
    original: Path, tmp_path: Path, kind: str, dtype: str
) -> None:
    """The text is that of a checkpoint with the same integers, packed by compressed-tensors."""
    file = file_of(original, kind)
    readable = {str(hf_name(one.name)): one for one in gguf.GGUFReader(file).tensors}
    weights = {name: torch.from_numpy(values) for name, values in dequantised(file).items()}
    config = ModelConfig.from_folder(file)
    assert config.quantization is not None
    for name in [*weights]:
        if "proj" not in name:
            continue
        assert readable[name].tensor_type.name == kind
        matrix = weights.pop(name)
        groups = matrix.view(len(matrix), -1, 32)  # [N, K/32, 32]
        scales = scales_of(readable[name], is_llama(file), name)  # [N, K/32]
        values = torch.where(scales[..., None] == 0, 0, groups / scales[..., None]).round().to(torch.int8)
        assert torch.equal(values * scales[..., None], groups)
        module = name.removesuffix(".weight")
        weights[f"{module}.weight_packed"] = pack_to_int32(values.flatten(1), KEPT_BITS[kind])
        weights[f"{module}.weight_scale"] = scales.half()
        weights[f"{module}.weight_shape"] = torch.tensor(values.flatten(1).shape)
    folder = tmp_path / "packed"
    shutil.copytree(original, folder)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    edit_config(folder, quantization_config=config.raw["quantization_config"])
    assert ids_of(file, dtype) == ids_of(folder, dtype)


def scales_of(stored: gguf.ReaderTensor, interleaved: bool, name: str) -> torch.Tensor:
    """Return the fp16 number at the beginning of each block, [N, K/32], in Hugging Face's order of rows."""
    blocks = stored.data.reshape(stored.data.shape[0], -1, gguf.GGML_QUANT_SIZES[stored.tensor_type][1])
    found = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[..., 0].astype(np.float32)
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
    if interleaved and heads is not None:
        found = turned(found, heads)
    return torch.from_numpy(np.ascontiguousarray(found))
