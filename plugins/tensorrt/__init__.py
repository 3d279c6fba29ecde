"""TensorRT plugins for the ops of a step: quick-deploy plugins (`tensorrt.plugin`) in the namespace `trtspec`.

| plugin | inputs, in order | attributes | outputs |
|---|---|---|---|
| trtspec::SpecAttention | q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables | (below) | out, caches |
| trtspec::ProcessLogits | logits, positions, ban_ids, ban_until, temperatures, top_ks, top_ps, min_ps | | logits |
| trtspec::SpecSample | logits, greedy, seeds, positions | | tokens |
| trtspec::SpecSampleVocab | logits, greedy, seeds, positions, vocab_ids | | tokens |
| trtspec::SpecAccept | sampled, draft_tokens, draft_lens, forced_accept, emits | | tokens, num_tokens |
| trtspec::KvCompact | k_cache, v_cache, block_tables, starts, path | | caches |

SpecAttention's attributes are scale (float), window (int) and softcap (float). Shapes and dtypes are those of the ops
(see the docstrings in trtspec/ops). A quick-deploy plugin has a fixed list of inputs, so an op whose optional inputs
come in several combinations has a plugin for each of those that step graphs use; `signatures.plugin_of` names the one
for a node, or says that there is none. New caches alias the old ones.

Each plugin has a JIT form (jit.py: Python at run time) and an AOT form (aot.py: a kernel that the engine holds, no
Python at run time). What an engine takes is asked for per network, by
NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS or PREFER_JIT_PYTHON_PLUGINS, or per ONNX node, by the
attribute aot = 1 or 0.

From ONNX: TensorRT's parser hands a node that it does not know to the plugin whose name is the node's op_type, whose
version is the attribute plugin_version ("1" if absent) and whose namespace is the attribute plugin_namespace or, where
no such plugin is found, the node's domain (onnx-tensorrt from 10.x on, FallbackPluginImporter in onnxOpImporters.cpp
and onnxOpCheckers.cpp; before, and in its 10.1, the attribute alone). So a node `SpecAccept` of domain `trtspec`
becomes `trtspec::SpecAccept`, and one that says plugin_namespace = "trtspec" does with either. The parser passes
only attributes that are on the node, none by default, and a quick-deploy plugin fails without one of its own: nodes
must carry all of them. An empty optional input reaches the plugin as a null tensor, which quick-deploy plugins cannot
take: the node is to be renamed and its empty inputs dropped before, by `signatures.plugin_of`.

Aliases: TensorRT wants PreviewFeature.ALIASED_PLUGIN_IO_10_03 for them, and documents (IPluginV3OneBuildV2's
getAliasedInput, in NvInferRuntime.h) that an input may be aliased by one output only, that it may insert copies, and
that two plugins which alias the *same* tensor may write to copies that differ. Chained calls do not: the second one's
cache is the first one's output. That such a chain, one call per draft step over one KV binding, stays one buffer
from the engine's input to its output is assumed, as is that the caller binds the output to the input's address.

Not shown by any test here, as it needs a GPU and TensorRT's builder: that the parser builds a network of these
plugins, that an engine of them runs, and what the chain of aliases costs.
"""

from __future__ import annotations


def register() -> list[str]:
    """Register every plugin with TensorRT, once per process; returns their ids (`trtspec::<name>`).

    ImportError, with what to do, where TensorRT is not installed or trtspec.ops has not been imported.
    """
    try:
        import tensorrt.plugin  # noqa: F401
    except ImportError as error:
        raise ImportError(f"TensorRT is missing ({error}): pip install 'trtspec[tensorrt]'") from error
    from trtspec_plugins.tensorrt import aot  # noqa: F401  (importing registers; aot imports jit)
    from trtspec_plugins.tensorrt.signatures import PLUGINS

    return [f"trtspec::{name}" for name in PLUGINS]
