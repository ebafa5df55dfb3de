"""The machine that a plan is for: this one, by its calibration, or one that is told of by its rates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from hotset.analysis.planner.calibration import Calibration
from hotset.analysis.planner.rates import GPU_LINK_SHARE, Engine, Rates, cpu_rates, gpu_rates
from hotset.analysis.planner.tiers import Memory
from hotset.errors import HotsetError
from hotset.shape import parse_memory
from hotset.sim.link import parse_speed

DISK_BYTES_PER_S = 2e9
"""What a disk that is not named reads per second, on a machine that is not there."""
GPU_BYTES_PER_S, LINK_BYTES_PER_S = 500e9, 25e9
"""What a GPU's memory and its link are taken to do where neither is measured nor given: about those of an RTX 4070
(12 GiB, 504 GB/s) in 16 lanes of PCIe 4."""
ASSUMED_SPREAD = 0.4
"""How far a token's time may be off by that: cards with 12 GiB read 360 to 912 GB/s."""
_TARGET = re.compile(r"(\d+(?:\.\d+)?)\s*(?:tok|tokens?|t)?/s", re.IGNORECASE)
_MAX_TARGET = 1e6


@dataclass(frozen=True, slots=True)
class Told:
    """What a person says of the machine; what is None is this machine's."""

    gpu: str | None = None
    ram: str | None = None
    link: str | None = None
    disk: str | None = None
    memory_bandwidth: str | None = None

    def check(self) -> None:
        """Refuse what does not go together, before anything is read or measured."""
        if self.link is not None and (self.gpu is None or not self.has_gpu):
            raise HotsetError("--link is between RAM and a GPU: give --gpu, too, or leave it out")
        speeds = {"--link": self.link, "--disk": self.disk, "--memory-bandwidth": self.memory_bandwidth}
        for flag, speed in speeds.items():
            if speed is not None and not _speed_of(flag, speed) > 0:
                raise HotsetError(f"{flag} must be above 0, as 25GB/s")
        if self.ram is not None and parse_memory(self.ram) <= 0:
            raise HotsetError("--ram must be above 0, as 32GiB")

    @property
    def has_gpu(self) -> bool:
        """Whether a GPU is asked for; a size of 0 is none."""
        return self.gpu is not None and parse_memory(self.gpu) > 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether the machine is another one, known by its rates alone."""
        return self.memory_bandwidth is not None


def _speed_of(flag: str, speed: str) -> float:
    """The speed that an option gives; one that cannot be read names the option."""
    try:
        return parse_speed(speed)
    except HotsetError as error:
        raise HotsetError(f"{flag}: {error}") from None


RatesOf = Callable[[Engine], Rates]


def rates_elsewhere(told: Told, disk_bytes_per_s: float = DISK_BYTES_PER_S) -> RatesOf:
    """The rates of a machine that is not there; what is not told is assumed (`assumed` says it), or the disk given."""
    memory = parse_speed(told.memory_bandwidth) if told.memory_bandwidth else GPU_BYTES_PER_S
    link = parse_speed(told.link) if told.link else LINK_BYTES_PER_S
    disk = parse_speed(told.disk) if told.disk else disk_bytes_per_s
    guessed = told.has_gpu and (told.memory_bandwidth is None or told.link is None)

    def rates_of(engine: Engine) -> Rates:
        if engine is Engine.CPU:
            return cpu_rates(memory, disk)
        found = gpu_rates(memory, link, disk, host=engine is Engine.HOST)
        if not guessed:
            return found
        return replace(found, spread=math.hypot(found.spread, ASSUMED_SPREAD), source="assumed in part")

    return rates_of


def assumed(told: Told, *, disk_known: bool = False) -> list[str]:
    """A line for each figure of a machine that is not there and that was not told: what is assumed, and the option."""
    lines = []
    if told.has_gpu and told.memory_bandwidth is None:
        lines.append(
            f"--memory-bandwidth was not given, and no GPU is measured: {GPU_BYTES_PER_S / 1e9:g} GB/s is assumed, "
            "about an RTX 4070's, and the interval is wide"
        )
    if told.has_gpu and told.link is None:
        lines.append(
            f"--link was not given: {LINK_BYTES_PER_S / 1e9:g} GB/s is assumed, as of 16 lanes of PCIe 4, and the "
            "interval is wide"
        )
    if not told.has_gpu:
        lines.append(
            "of a CPU that is not here, times per layer and of long prompts are taken from one with two cores: with "
            "more of them the first token comes sooner"
        )
    if told.disk is None and not disk_known:
        lines.append(f"--disk was not given: {DISK_BYTES_PER_S / 1e9:g} GB/s is assumed")
    return lines


def rates_here(calibration: Calibration, told: Told) -> RatesOf:
    """The rates of this machine, with what was said otherwise."""

    def rates_of(engine: Engine) -> Rates:
        if engine is Engine.CPU:
            found = calibration.rates()
            return replace(found, miss_bytes_per_s=parse_speed(told.disk)) if told.disk else found
        found = calibration.gpu_rates(host=engine is Engine.HOST)
        if told.link:
            share = 1.0 if engine is Engine.HOST else GPU_LINK_SHARE
            link = parse_speed(told.link)
            found = replace(found, miss_bytes_per_s=link * share, prompt_miss_bytes_per_s=link)
        return replace(found, far_bytes_per_s=parse_speed(told.disk)) if told.disk else found

    return rates_of


def memory_of(told: Told, ram_here: Callable[[], int], gpu_here: Callable[[], int | None]) -> Memory:
    """The memory to plan for: as told, or what is free here."""
    ram = parse_memory(told.ram) if told.ram is not None else ram_here()
    if told.gpu is not None:
        return Memory(ram, parse_memory(told.gpu) or None)
    return Memory(ram, None if told.is_elsewhere else gpu_here())


def parse_target(text: str) -> float:
    """Read a target such as "20tok/s", in tokens per second."""
    match = _TARGET.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) <= _MAX_TARGET:
        raise HotsetError(f'cannot read the target "{text:.40}": write tokens per second, as 20tok/s')
    return float(match[1])
