"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings.

All of it is per-request host code over token ids. A checkpoint without tokenizer.json has none of these parts, but
still works with token ids.
"""

from trtspec.text.stream import IncrementalDetokenizer, StopMatcher, TextStream
from trtspec.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopMatcher", "TextStream", "Tokenizer"]
