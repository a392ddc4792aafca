"""What a check found, as a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Verdict"]


class Verdict(Enum):
    """How bad it is: ``FAIL`` keeps this host, or this pair, from connecting; ``WARN`` may, later."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found.

    Args:
        name: what was looked at, one short word.
        verdict: how bad it is.
        words: what was seen and what it means, a sentence or two.
        fix: the command or the setting that mends it, "" if nothing need be done.
    """

    name: str
    verdict: Verdict
    words: str
    fix: str = ""

    def asdict(self) -> dict[str, str]:
        """For JSON."""
        return {"name": self.name, "verdict": self.verdict.value, "words": self.words, "fix": self.fix}
