"""TensorRT plugins for the ops of a step: quick-deploy plugins (`tensorrt.plugin`) in the namespace `trtspec`.

| plugin | inputs, in order | attributes | outputs |
|---|---|---|---|
| trtspec::SpecAttention | q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables | (below) | out, caches |
| trtspec::SpecAttentionChained | the same | (below) | out, caches |
| trtspec::ProcessLogits | logits, positions, ban_ids, ban_until, temperatures, top_ks, top_ps, min_ps | | logits |
| trtspec::ProcessLogitsConstrained | ProcessLogits' and LogitConstraints, in the op's order | | logits |
| trtspec::SpecSample | logits, greedy, seeds, positions | | tokens |
| trtspec::SpecSampleVocab | logits, greedy, seeds, positions, vocab_ids | | tokens |
| trtspec::SpecAccept | sampled, draft_tokens, draft_lens, forced_accept, emits | | tokens, num_tokens |
| trtspec::LinearLogits | x [R, K], weight [N, K], in bf16 or fp16; K is a multiple of 64 | | logits [R, N] fp32 |
| trtspec::QuantizeGroups | x [T, K] | group | values, x_scales, x_sums, as of the op quantize_groups |
| trtspec::GroupsLinear | x, values, x_scales, x_sums, panels, scales, zeros, bias [N] | bits | [T, N] |
| trtspec::KvCompact | k_cache, v_cache, block_tables, starts, path | | caches |

SpecAttention's attributes are scale (float), window (int) and softcap (float). Shapes and dtypes are those of the ops
(docstrings in trtspec/ops). A quick-deploy plugin has a fixed list of inputs. So an op whose optional inputs come in
several combinations has a plugin for each combination that step graphs use. `signatures.plugin_of` names the plugin for
a node, or says that there is none. The new caches of SpecAttentionChained and KvCompact alias the old ones. Those of
SpecAttention must be bound to the old ones' addresses.

Each plugin has a JIT form (jit.py: Python at run time) and an AOT form (aot.py: a kernel that the engine holds, no
Python at run time). NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS or PREFER_JIT_PYTHON_PLUGINS selects the
form for a network. The attribute aot = 1 or 0 selects it for an ONNX node.

From ONNX: TensorRT's parser passes a node that it does not know to a plugin. The plugin's name is the node's op_type,
and its version is the attribute plugin_version ("1" if absent). Its namespace is the attribute plugin_namespace or, if
no such plugin is found, the node's domain. The domain counts from onnx-tensorrt 10.x on (FallbackPluginImporter in
onnxOpImporters.cpp and onnxOpCheckers.cpp); before, and in its 10.1, the attribute alone counts. So a node `SpecAccept`
of domain `trtspec` becomes `trtspec::SpecAccept`. With plugin_namespace = "trtspec" it does so in all versions.
The parser passes only attributes that are on the node, none by default, and a quick-deploy plugin fails if one of its
own is missing. Nodes must therefore carry all of them. An empty optional input reaches the plugin as a null tensor,
which quick-deploy plugins cannot take. The node must be renamed and its empty inputs dropped before, by
`signatures.plugin_of`.

Attention over a cache that no other node changes has no aliases. Another of NVIDIA's projects reports that TensorRT
keeps a copy of each layer's cache for them, or rejects the engine.

Aliases: TensorRT wants PreviewFeature.ALIASED_PLUGIN_IO_10_03 for them. Its documentation (IPluginV3OneBuildV2's
getAliasedInput, in NvInferRuntime.h) says that only one output may alias an input, and that TensorRT may insert copies.
It also says that two plugins which alias the *same* tensor may write to copies that differ. Chained calls do not alias
the same tensor: the second one's cache is the first one's output. Such a chain has one call per draft step over one KV
binding. It is assumed that the chain stays one buffer from the engine's input to its output, and that the caller binds
the output to the input's address.

No test here shows what needs a GPU and TensorRT's builder. That is whether the parser builds a network of these
plugins, whether an engine of them runs, and what the chain of aliases costs.
"""

from __future__ import annotations


def register() -> list[str]:
    """Register every plugin with TensorRT, once per process. Returns their ids (`trtspec::<name>`).

    ImportError, with advice, if TensorRT is not installed or trtspec.ops has not been imported.
    """
    try:
        import tensorrt.plugin  # noqa: F401
    except ImportError as error:
        raise ImportError(f"TensorRT is missing ({error}): pip install 'trtspec[tensorrt]'") from error
    from trtspec_plugins.tensorrt import aot  # noqa: F401  (importing registers; aot imports jit)
    from trtspec_plugins.tensorrt.signatures import PLUGINS

    return [f"trtspec::{name}" for name in PLUGINS]
