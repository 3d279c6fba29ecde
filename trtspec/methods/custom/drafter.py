"""A drafter that the user provides: as a name, a class or an object."""

from __future__ import annotations

from typing import Any, cast

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.errors import ConfigError, TrtSpecError
from trtspec.methods.custom.options import CustomOptions
from trtspec.methods.drafter import DraftModel
from trtspec.methods.table import Ref
from trtspec.protocols import Drafter


class CustomDrafter:
    """A factory for the user's drafter."""

    @staticmethod
    def of(speculation: SpeculationPlan, model: DraftModel | None = None, max_num_tokens: int = 0) -> Drafter:
        """Return the drafter that the options give as "package.module:Class", as a class, or as an object.

        Raises ConfigError if this is no drafter, or if its own code fails.
        """
        own = cast("CustomOptions", speculation.options).drafter
        try:
            found: Any = _opened(own) if isinstance(own, str) else own
            drafter = found() if isinstance(found, type) else found
        except TrtSpecError:
            raise
        except Exception as error:
            raise ConfigError(
                f"drafter={own!r} cannot be made ({type(error).__name__}: {error}); correct it, or give the object "
                "itself: a class is called without arguments"
            ) from error
        missing = [name for name in ("propose", "forget") if not callable(getattr(drafter, name, None))]
        if missing:
            raise ConfigError(
                f"drafter={found!r} has no {' and no '.join(missing)}; give it the methods of protocols.Drafter"
            )
        return cast(Drafter, drafter)


def _opened(path: str) -> Any:
    try:
        return Ref(path).open()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f'drafter={path!r} cannot be loaded ({error}); give "package.module:Class"') from error
