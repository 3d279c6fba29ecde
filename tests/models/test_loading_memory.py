"""Loading needs little more memory than the loaded weights, measured as the resident set of a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import edit_config, tiny_config
from tests.quantized_checkpoints import Kind

PEAK = Path("/proc/self/clear_refs")  # Linux: writing 5 restarts the measurement of VmHWM
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}
SIZES |= {"head_dim": 64, "vocab_size": 512}
GPTQ = Kind("gptq", 4, 128)

LOAD = """
import sys
from pathlib import Path
import torch
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.models.layers import weight_bytes
from trtspec.models.weights import load_decoder

def kilobytes(line):
    return int(Path("/proc/self/status").read_text().split(line + ":")[1].split()[0])

torch.set_num_threads(1)
config = ModelConfig.from_folder(Path(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
decoder = load_decoder(config, torch.bfloat16)
print(1024 * (kilobytes("VmHWM") - before), weight_bytes(decoder))
"""


def gptq(shape: torch.Size) -> dict[str, Tensor]:
    """Return random integers of a linear [N, K], whose weights are 0..15 and zero points 8."""
    (N, K), G = shape, shape[1] // GPTQ.group_size
    return {
        "qweight": torch.randint(2**31, (K // 8, N), dtype=torch.int32),
        "qzeros": torch.full((G, N // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((G, N), 0.01, dtype=torch.float16),
        "g_idx": torch.arange(K, dtype=torch.int32) // GPTQ.group_size,
    }


def checkpoint(folder: Path, layers: int, quantised: bool) -> Path:
    config = tiny_config("qwen2", **SIZES, num_hidden_layers=layers)
    with torch.device("meta"):
        shapes = {
            name: t.shape for name, t in transformers.AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    tensors = {}
    for name, shape in shapes.items():
        if quantised and name.endswith("proj.weight"):
            tensors |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in gptq(shape).items()}
        else:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
    config.dtype, config.architectures = "bfloat16", ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if quantised:
        edit_config(folder, quantization_config=GPTQ.config())
    return folder


@pytest.mark.skipif(not PEAK.exists(), reason="needs Linux's /proc/self/clear_refs to measure a peak")
@pytest.mark.parametrize(
    ("layers", "quantised"),
    [pytest.param(24, False, id="bf16", marks=pytest.mark.long), pytest.param(96, True, id="int4")],
)
def test_peak_is_little_more_than_the_weights(tmp_path: Path, layers: int, quantised: bool) -> None:
    """The peak of loading 155 MB of weights is less than 1.35 times their size.

    The largest linear has 1 or 2% of the weights. 25 MB of the peak are pages of the file and of code.
    """
    folder = checkpoint(tmp_path, layers, quantised)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc then returns freed memory, whatever lies next to it
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    peak, weights = map(int, done.stdout.split())
    assert 1.5e8 < weights < 1.7e8
    assert peak < 1.35 * weights
