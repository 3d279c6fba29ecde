"""Prints token ids by llama.cpp, with a GGUF file's tokenizer; the Python must have llama-cpp-python.

python llama_ids.py FILE < texts.json > ids.json
"""

from __future__ import annotations

import json
import sys

import llama_cpp

model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
json.dump([model.tokenize(text.encode(), add_bos=True, special=True) for text in json.load(sys.stdin)], sys.stdout)
