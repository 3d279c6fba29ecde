"""GGUF files, as llama.cpp writes them, read as the Hugging Face folders from which they were made."""

SUFFIX = ".gguf"
