"""Token ids by llama.cpp, of a GGUF file's tokenizer: run with a Python that has llama-cpp-python.

python llama_ids.py FILE < texts.json > ids.json
"""

from __future__ import annotations

import json
import sys

import llama_cpp

model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
json.dump([model.tokenize(text.encode(), add_bos=True, special=True) for text in json.load(sys.stdin)], sys.stdout)
