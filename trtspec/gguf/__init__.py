"""GGUF files, as llama.cpp writes them, read as the Hugging Face folders that they were made from."""

SUFFIX = ".gguf"
