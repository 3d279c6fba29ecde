"""The complete interface to kernels: a few ops, each with a contract, a fake for export and a pure-torch reference.

Call the ops as `torch.ops.trtspec.<name>`, or by the typed functions that are exported here. References are registered
for every device under the key of lowest priority. A plugin that registers the same op for CPU or CUDA therefore takes
precedence.
"""

from trtspec.ops.accept import spec_accept
from trtspec.ops.attention import spec_attention, spec_attention_
from trtspec.ops.compact import kv_compact, kv_compact_
from trtspec.ops.dispatch import graph_calls, kernel_interface, load_plugins
from trtspec.ops.elementwise import rotate_heads, rotate_heads_inline, silu, silu_mul, silu_mul_inline
from trtspec.ops.embedding import packed_embedding
from trtspec.ops.graphs import GraphUse, Lent, open_row, runs_graphs
from trtspec.ops.linear import packed_linear, packed_swiglu
from trtspec.ops.logits import process_logits
from trtspec.ops.norm import rms_norm, rms_norm_inline
from trtspec.ops.sample import gumbel_noise, spec_sample
from trtspec.ops.threads import kernel_threads

__all__ = [
    "GraphUse",
    "Lent",
    "graph_calls",
    "gumbel_noise",
    "kernel_interface",
    "kernel_threads",
    "kv_compact",
    "kv_compact_",
    "load_plugins",
    "open_row",
    "packed_embedding",
    "packed_linear",
    "packed_swiglu",
    "process_logits",
    "rms_norm",
    "rms_norm_inline",
    "rotate_heads",
    "rotate_heads_inline",
    "runs_graphs",
    "silu",
    "silu_mul",
    "silu_mul_inline",
    "spec_accept",
    "spec_attention",
    "spec_attention_",
    "spec_sample",
]
