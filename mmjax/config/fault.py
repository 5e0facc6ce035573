"""One fault of a configuration, and the error of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from mmjax.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing wrong with a configuration."""

    path: str
    """Dotted name of the setting, e.g. `model.moe.num_experts`."""
    found: str
    """What was given, with the numbers that clash."""
    remedy: str
    """What is possible and what to do."""


class ConfigurationFaults(ConfigurationError):
    """All faults of one configuration."""

    def __init__(self, where: str, faults: Sequence[Fault]):
        self.faults = tuple(faults)
        super().__init__(
            where,
            found="; ".join(f"{fault.path}: {fault.found}" for fault in faults),
            expected="settings that fit together",
            remedy="; ".join(f"{fault.path}: {fault.remedy}" for fault in faults),
        )


def divisors_of(number: int) -> str:
    """A remedy's list of the divisors of a number, the smallest twelve."""
    divisors = [divisor for divisor in range(1, min(number, 1024) + 1) if number % divisor == 0]
    return ", ".join(str(divisor) for divisor in divisors[:12]) + (", ..." if len(divisors) > 12 else "")
