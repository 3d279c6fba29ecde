"""The option that gives the user's drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtspec.methods.options import MethodOptions


@dataclass(frozen=True, kw_only=True)
class CustomOptions(MethodOptions):
    """Options of the method "custom".

    drafter: "package.module:Class", a class, or an object with the methods of protocols.Drafter.
    """

    drafter: Any
