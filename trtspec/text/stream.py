"""Incremental conversion of token ids to text: detokenizer and stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trtspec.errors import RequestError
from trtspec.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# An unfinished UTF-8 character is at most 3 bytes, hence 3 tokens. UTF-8 is in step again 4 tokens after any cut.
_MAX_PENDING = 8


class IncrementalDetokenizer:
    """A detokenizer: token ids in, text out as soon as the text can no longer change.

    Law: the joined results of push() and a final flush() equal `tokenizer.decode(all ids, skip_special_tokens)`.
    Text that may still change is held back: an unfinished UTF-8 character, and with byte-fallback tokenizers a whole
    run of byte tokens. Such a run decodes to characters or to U+FFFD, depending on its last byte.

    Decoding depends on the left neighbour: a leading space is dropped only at the start of a text. So new ids are
    decoded after those of the previous delta. The window holds the ids since that delta: few, but for runs of bytes.

    prompt: ids before the text. Its last token is decoded before the first ids, so a space between them stays: the law
    holds for that token and all ids, without the text of that token. It counts if it is visible and whole characters.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = self._context(prompt)  # ids of the previous delta, then the ids since
        self._num_context = len(self._window)  # number of ids of the previous delta
        self._num_sent = len(self._decode_window())  # number of characters of decode(window) already returned

    def push(self, token_ids: Iterable[int]) -> str:
        """Append ids; return the text that became certain, often ""."""
        return "".join([self._push_one(token) for token in token_ids])

    def flush(self) -> str:
        """End the text; return the text that was held back."""
        text = self._decode_window()[self._num_sent :]
        self._window, self._num_context, self._num_sent = [], 0, 0
        return text

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The last token of the prompt, if it is visible and whole characters."""
        last, skip = list(prompt[-1:]), self._skip_special_tokens
        if not last or not self._tokenizer.is_visible(last[0], skip):
            return []
        return [] if _REPLACEMENT in self._tokenizer.decode(last, skip) else last

    def _decode_window(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)

    def _push_one(self, token: int) -> str:
        if not self._tokenizer.is_visible(token, self._skip_special_tokens):
            return ""
        self._window.append(token)
        if self._tokenizer.is_byte_token(token):
            return ""
        text = self._decode_window()
        # An unfinished character shows as one U+FFFD at the very end
        num_settled = len(text) - text.endswith(_REPLACEMENT)
        delta = text[self._num_sent : num_settled]
        self._num_sent += len(delta)
        if delta and num_settled == len(text):
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_sent = len(self._decode_window())
        elif len(self._window) - self._num_context > _MAX_PENDING:
            # Endless invalid bytes: only the last U+FFFD is open, and a few ids are enough to determine its character
            num_open = len(text) - self._num_sent
            self._window = self._window[-_MAX_PENDING // 2 :]
            self._num_context = 0
            self._num_sent = len(self._decode_window()) - num_open
        return delta


class StopMatcher:
    """A matcher that cuts a stream of text at the first stop string; it holds back text that may begin one.

    The stop string that ends first wins; of those that end together, the longest wins. So emitted text contains no
    stop string, nor the beginning of one that is completed later, however the text is divided. Exceptions are the
    matched one with include_stop_str_in_output, and text that comes while the matcher is not armed.
    """

    def __init__(self, stop: Sequence[str] = (), include_stop_str_in_output: bool = False) -> None:
        """Raises RequestError for an empty stop string."""
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(self._stops):
            raise RequestError(f"stop = {list(self._stops)}: a stop string must not be empty; remove it")
        self._include = include_stop_str_in_output
        self._max_held = max((len(s) - 1 for s in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None  # the stop string found; nothing is emitted after it

    def push(self, text: str, armed: bool = True) -> str:
        """Append text; return the text that may be shown. Stop strings that end in this text count only if `armed`."""
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        buffer, num_old = self._held + text, len(self._held)
        if armed and (found := self._first_stop(buffer, num_old)) is not None:
            start, end, self.matched = found
            self._held = ""
            return buffer[: end if self._include else start]
        cut = next(
            (n for n in range(max(len(buffer) - self._max_held, 0), len(buffer)) if self._may_stop(buffer[n:])),
            len(buffer),
        )
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """End the text; return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _may_stop(self, text: str) -> bool:
        """Whether a stop string begins with `text` and goes on."""
        return any(stop.startswith(text) and len(stop) > len(text) for stop in self._stops)

    def _first_stop(self, buffer: str, num_old: int) -> tuple[int, int, str] | None:
        """(start, end, stop) of the first stop string that ends after the `num_old` characters already searched."""
        found = []
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        end, start, stop = min(found)
        return start, end, stop


class TextStream:
    """The text of one request: a detokenizer, then stop strings.

    `text` is all text that push() and flush() returned so far. After a stop string, `matched_stop` names it, and
    `num_tokens` is the number of pushed ids up to and including the one that completed it. The caller must cut later
    ids of the same step. Ids are processed one by one, so the result does not depend on the number of ids per step.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        """Stop strings completed within the first `min_tokens` ids do not count. prompt: ids before the text."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, prompt)
        self._matcher = StopMatcher(stop, include_stop_str_in_output)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.text = ""

    @property
    def matched_stop(self) -> str | None:
        return self._matcher.matched

    def push(self, token_ids: Iterable[int]) -> str:
        """Append ids; return the text that may be shown. Ids after a stop string are ignored and not counted."""
        return self._emit(self._push(token_ids))

    def flush(self) -> str:
        """End the text (end of sequence, length, abort); return the text that was held back.

        It may still find a stop string in an unfinished run of byte tokens.
        """
        tail = self._matcher.push(self._detokenizer.flush(), self._armed)
        return self._emit([tail, self._matcher.flush()])

    @property
    def _armed(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _push(self, token_ids: Iterable[int]) -> Iterator[str]:
        for token in token_ids:
            if self.matched_stop is not None:
                return
            self.num_tokens += 1
            yield self._matcher.push(self._detokenizer.push((token,)), self._armed)

    def _emit(self, parts: Iterable[str]) -> str:
        delta = "".join(parts)
        self.text += delta
        return delta
