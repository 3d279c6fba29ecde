"""A linear that is quantised in its checkpoint, and the interface of a kind of quantised weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from trtspec.errors import CheckpointError, UnsupportedError
from trtspec.models.layers import Linear
from trtspec.models.slots import Slot
from trtspec.ops.packing import PANEL

S = TypeVar("S")  # a scheme of trtspec.config.checkpoint.weight_schemes
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part(Generic[S]):
    """A quantised linear of the checkpoint, and the rows of our matrix that it becomes. `where` begins error texts."""

    name: str
    scheme: S
    slot: Slot
    where: str

    def unsupported(self, problem: str, remedy: str | None = None, name: str | None = None) -> UnsupportedError:
        remedy = remedy or "use a checkpoint that is quantised otherwise, or the unquantised one with quantization="
        return UnsupportedError(f"{self.where}: {name or self.name} {problem}; {remedy}")

    def damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.name} {problem}; download it again, or quantise it anew")


class Format(ABC, Generic[S]):
    """A kind of quantised weights.

    Tensors are named by the last part of their names. `parts` are the linears that form one matrix of ours, in the
    order of its rows; they have been checked to fit each other.
    """

    @abstractmethod
    def problem(self, part: Part[S]) -> str | None:
        """Reason why the linear cannot be held as it is, judged by its shape alone; None = it can."""

    @abstractmethod
    def shapes(self, part: Part[S]) -> tuple[Shapes, Shapes]:
        """Shapes of the tensors that the linear must have, and of those that it may have."""

    @abstractmethod
    def misfit(self, part: Part[S], kind: str, tensor: Tensor) -> str | None:
        """Dtype that the tensor should have, if it has another; None = it fits."""

    @abstractmethod
    def hold(self, linear: Linear, parts: Sequence[Part[S]], tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """Pack the parts' tensors. UnsupportedError or CheckpointError for values that no layout can hold."""

    @abstractmethod
    def describe(self, linear: Linear, parts: Sequence[Part[S]]) -> None:
        """Give the linear the tensors that it will hold, on torch's meta device."""

    @abstractmethod
    def num_bytes(self, parts: Sequence[Part[S]]) -> int:
        """Bytes of the tensors that the linear will hold."""

    def finish(self, where: str) -> None:
        """Report what there is to report, after all linears are packed."""


def padded_columns(parts: Sequence[Part[S]]) -> int:
    """Number of output columns of the packed matrix, in whole panels."""
    return -(-sum(part.slot.shape[0] for part in parts) // PANEL) * PANEL
