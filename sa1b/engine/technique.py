"""Where optional techniques hang on the training loop.

    WATCHDOG: Place[Watching] = Place("sa1b.engine.watch.watchdog:Watchdog", "--health.stall")
    watchdog = WATCHDOG.load()                    # imports the module; only if a run asks for the technique

A technique is one module, or one package, that no statement of the loop imports. The loop names it at one
place, a constant of this class, whose type is what the loop expects of it. If the module is deleted, every
run that does not ask for it trains as before.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Generic, TypeVar, cast

from sa1b.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place(Generic[T]):
    target: str  # its module and the object in it, as MODULE:NAME
    flag: str  # the flag that asks for it, for the message if the module is missing

    def load(self) -> T:
        """The object; UsageError if the module is missing."""
        if (technique := self.find()) is None:
            raise UsageError(
                f"{self.flag}: needs the module {self.module}, which is not installed; drop the flag, or "
                "install sa1b again"
            )
        return technique

    def find(self) -> T | None:
        """The object; None if the module is missing."""
        try:
            return cast(T, getattr(import_module(self.module), self.target.partition(":")[2]))
        except ModuleNotFoundError as error:
            if error.name != self.module:
                raise
            return None

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]
