"""The questions that drafters are asked. What they show of a request cannot be changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from torch import Tensor

from trtspec.engine.request import Request
from trtspec.protocols import DraftRequest


class ShownTokens(Sequence[int]):
    """A read-only view of a list of the engine.

    A drafter that appended its drafts to a request's tokens would change the text. A copy for each step would take time
    in proportion to the length of the text.
    """

    __slots__ = ("_items",)

    def __init__(self, items: list[int]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._items[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


def question_to_drafter(request: Request, length: int, depth: int | None, states: Tensor | None) -> DraftRequest:
    """Return the question for at most `length` drafts of a request.

    depth: most tokens ahead, for trees. states: hidden states of the rows without draft KV, if the drafter reads them.
    """
    return DraftRequest(
        request_id=request.request_id,
        tokens=ShownTokens(request.tokens),
        max_draft_len=length,
        sampling=request.sampling,
        block_table=ShownTokens(request.kv.blocks),
        draft_kv_len=request.kv.draft_kv_len,
        hidden_states=states,
        prompt_len=request.prompt_len,
        max_depth=depth,
    )
