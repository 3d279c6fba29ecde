"""Runs llama.cpp's quantiser; the Python must have llama-cpp-python.

python llama_quantize.py FROM.gguf TO.gguf Q4_K_M
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))
