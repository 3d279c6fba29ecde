"""tokenizer.json and tokenizer_config.json of the tokenizer in a GGUF file.

Ids are those of llama.cpp with special tokens parsed (parse_special). Text is split as llama.cpp splits it, even where
the tokenizer that the model was trained with differs. Only a name (tokenizer.ggml.pre) says how text is split before
pieces are merged. Source: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtspec.gguf.metadata import MetadataReader

if TYPE_CHECKING:
    import tokenizers

# Kinds of tokens (llama_token_type).
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_BLANK = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_WORDS % r"\p{N}{1,3}",),
    "qwen2": (_WORDS % r"\p{N}",),
    "smollm": (r"\p{N}", _GPT2),
}
"""tokenizer.ggml.pre -> the expressions that split text, applied one after the other."""
ENDINGS = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
        "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
        "<end_of_utterance>",
    )
)  # fmt: skip
"""Names of tokens that end a text or a turn."""
_LLAMA_BPE = "llama-bpe"  # texts begin with BOS unless the file says otherwise; words that are tokens stay whole


def hf_tokenizer(metadata: MetadataReader, size: int) -> tuple[str, dict[str, Any]] | None:
    """(tokenizer.json, contents of tokenizer_config.json); None if the file has no tokenizer. size: ids of the model.

    Raises CheckpointError. Raises UnsupportedError for an unknown kind of tokenizer, or an unknown way of splitting
    text.
    """
    if "tokenizer.ggml.model" not in metadata.file.metadata:
        return None
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise metadata.unsupported("tokenizer.ggml.model", f"supported: {', '.join(_KINDS)}")
    tokens, types = _tokens(metadata, size)
    tokenizer, adds_bos = _KINDS[kind](metadata, tokens)
    _add_special(tokenizer, tokens, types)
    # the class that uses tokenizer.json as it is, whatever the model
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    ids = {name: metadata.optional_id(f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in _SPECIAL}
    config |= {_SPECIAL[name]: tokens[token] for name, token in ids.items() if token is not None}
    _frame(metadata, tokenizer, tokens, ids, adds_bos)
    if templates := _chat_templates(metadata):
        config["chat_template"] = templates
    return str(tokenizer.to_str()), config


def ending_ids(metadata: MetadataReader, size: int) -> list[int]:
    """Ids of the tokens that end a text by what they are called, whatever the file's entries say; as in llama.cpp.

    Only control tokens and those that users defined count. Not among them are tokens of fill-in-the-middle prompts.
    size: ids of the model.
    """
    if "tokenizer.ggml.model" not in metadata.file.metadata:
        return []
    named = zip(*_tokens(metadata, size), strict=True)
    return [i for i, (token, kind) in enumerate(named) if token in ENDINGS and kind in (_CONTROL, _USER_DEFINED)]


def _chat_templates(metadata: MetadataReader) -> str | list[dict[str, str]] | None:
    """The chat template; a list if some have names, as tokenizer_config.json has them."""
    key = "tokenizer.chat_template"
    found: list[dict[str, str]] = []
    default = metadata.text(key) if key in metadata.file.metadata else None
    if f"{key}s" in metadata.file.metadata:
        found = [{"name": name, "template": metadata.text(f"{key}.{name}")} for name in metadata.texts(f"{key}s")]
    if default is not None and found:
        found.insert(0, {"name": "default", "template": default})
    return found or default


def _tokens(metadata: MetadataReader, size: int) -> tuple[list[str], list[int]]:
    """Texts and kinds of all tokens, by id."""
    key, types_key = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    tokens = metadata.texts(key)
    if not 0 < len(tokens) <= size:
        raise metadata.error(key, f"has {len(tokens)} texts for a model of {size} ids")
    if len(set(tokens)) < len(tokens):
        raise metadata.error(key, "has a text twice")
    if types_key not in metadata.file.metadata:
        return tokens, [1] * len(tokens)
    types = metadata.integers(types_key).tolist()
    if len(types) != len(tokens):
        raise metadata.error(types_key, f"has {len(types)} kinds for {len(tokens)} tokens")
    return tokens, types


def _byte_pairs(metadata: MetadataReader, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Tokenizer of GPT-2's kind: bytes are written as characters, and pairs are merged in a given order."""
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    pre = metadata.text("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise metadata.unsupported("tokenizer.ggml.pre", f"supported: {', '.join(PRE_TOKENIZERS)}")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    key = "tokenizer.ggml.merges"
    merges = []
    for merge in metadata.texts(key):
        first, blank, second = merge.partition(" ")
        # a piece may itself begin with a blank; the tokens then begin with one too
        if not (blank and first in vocabulary and second in vocabulary and first + second in vocabulary):
            raise metadata.error(key, f"has {merge!r:.80}, which are no two tokens that make a third")
        merges.append((first, second))
    whole = pre == _LLAMA_BPE
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=whole))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, whole


def _sentencepiece(metadata: MetadataReader, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Tokenizer of Llama 2's kind: a marker stands for a blank, and the pair whose token scores best merges first."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    key = "tokenizer.ggml.scores"
    scores = metadata.floats(key).tolist()
    if len(scores) != len(tokens):
        raise metadata.error(key, f"has {len(scores)} scores for {len(tokens)} tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = []
    for token, number in vocabulary.items():
        for cut in range(1, len(token)):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                pairs.append((-scores[number], number, cut, token[:cut], token[cut:]))
    unknown = metadata.optional_id("tokenizer.ggml.unknown_token_id", len(tokens))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            [(first, second) for *_, first, second in sorted(pairs)],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Replace(" ", _BLANK)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), *steps] if prefixed else steps)
    undo = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefixed else undo)
    return tokenizer, True


_KINDS = {"gpt2": _byte_pairs, "llama": _sentencepiece}
"""tokenizer.ggml.model -> function that returns a tokenizer, and whether texts begin with BOS by default."""


def _add_special(tokenizer: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add the tokens that are found in text before it is split: control tokens, and those that users defined.

    Decoded texts leave out control tokens.
    """
    from tokenizers import AddedToken

    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _frame(
    metadata: MetadataReader,
    tokenizer: tokenizers.Tokenizer,
    tokens: list[str],
    ids: dict[str, int | None],
    adds_bos: bool,
) -> None:
    """Put BOS before every text, and EOS after it, where the file asks for them."""
    from tokenizers import processors

    wanted = {
        "bos": metadata.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": metadata.flag("tokenizer.ggml.add_eos_token", False),
    }
    found = {name: (tokens[token], token) for name in wanted if wanted[name] and (token := ids[name]) is not None}
    if found:
        before, after = ([found[name][0]] if name in found else [] for name in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[*found.values()],
        )
