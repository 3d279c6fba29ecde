"""Texts that tokenizers disagree on: blanks, digits, case, scripts, marks, emoji, code, special tokens."""

from __future__ import annotations

import random

PIECES = (
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "a", "The", " the", "word", " Word", "'s", "'S", "'ll", "'LL",
    "don't", "'", '"', "0", "7", "42", "123", "1234", "12345678", "3.14", "1,000", "x1y2", "_", "__init__", "->", "==",
    "!=", "...", "!!", "?!", "(", ")", "[]", "{}", "<", ">", "$5", "+", "~", "^", "|", "\\", "/", "http://a.b/c?d=e",
    "é", "É", "naïve", "Füße", "e\u0301", "ﬁ", "İ", "ß", "日本", "語の", "中文", "한국어", "Привет", "мир", "שלום", "مرحبا", "हिन्दी",  # noqa: E501
    "ไทย", "😀", "👩‍👩‍👧", "🇫🇷", "\u200b", "\u00a0", "\u3000", "\u2028", "①", "Ⅷ", "½", "٣", "२", "\ufeff", "def f(x):",
    "    return", "\x00", "\x7f", "�", "€", "𝒳", "ǅ", "ªº",
)  # fmt: skip


def odd_texts(count: int, special: tuple[str, ...], seed: int = 0) -> list[str]:
    """Return texts of some pieces each, including the special tokens, and the empty text."""
    draw = random.Random(seed)
    pieces = (*PIECES, *special)
    return ["", *("".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(count - 1))]
