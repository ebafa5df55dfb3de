"""`RunOptions`: how a live model runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from hotset.checks import put
from hotset.errors import HotsetError, PolicyError
from hotset.options.declare import OptionError, Place, budget_or_auto, check_all, option
from hotset.shape import Budget, parse_memory

AUTO, OFF, DENSE = "auto", "off", "dense"
DEFAULT_POLICY = "blend"
CONTEXT_TOKENS = 4096
"""The context that room is left for where no other is asked for."""
MAX_CONTEXT = 1 << 28
PRIOR_TOKENS = 64
"""How many tokens of evidence a profile is worth; docs/results/warm-starts.md has the experiment."""
SCOPES = ("layer", "pool")
DTYPES = (AUTO, "bfloat16", "float16", "float32")
EXPERTS = (AUTO, DENSE)
_AMOUNTS = '"25%" or "8GiB"'

_CACHE, _LEARNING, _MODEL, MESSAGES = "Memory and cache", "Learning from use", "The model", "Messages"
_COMMANDS = Place.COMMAND | Place.FILE


class DriverChoice(StrEnum):
    """What is to drive a GPU in decode."""

    AUTO = "auto"  # the device where it can
    HOST = "host"
    DEVICE = "device"  # or it is an error


def check_policy(spec: str) -> None:
    """Refuse a policy that does not exist, or that cannot be used while a model runs."""
    from hotset.policies import parse

    if parse(spec).offline:
        raise PolicyError(f"{spec} needs to know the future: it is for hotset simulate; use {DEFAULT_POLICY} here")


def _named(spec: str, kind: str = "policy") -> str:
    """A policy or forecast by its name, where a file is given; hotset.toml, which runs no code, has names only."""
    if not isinstance(spec, str) or spec in (AUTO, OFF, DEFAULT_POLICY):
        return spec
    from hotset.plugins import resolve

    return resolve(spec, kind)


def _check_policy_or_auto(spec: str) -> None:
    if spec != AUTO:
        check_policy(spec)


def _check_prefetch(name: str) -> None:
    from hotset.forecasts import parse

    if name not in (AUTO, OFF):
        parse(name)


def pin_share(text: str) -> Budget:
    """Read how much to pin: "20%" of the slots, or "64 slots"."""
    share = Budget.parse(text)
    if share.size_bytes is not None:
        raise HotsetError(f'pins are a share of the cache ("20%") or a number of slots ("64 slots"), not "{text}"')
    return share


def _check_warm_pin(value: int | str) -> None:
    if isinstance(value, str) and value not in (AUTO, OFF) and not (value.isascii() and value.isdigit()):
        raise OptionError("warm_pin", f"takes a number of tokens, auto or off, not {value!r:.60}")


def _check_dtype(value: Any) -> None:
    if isinstance(value, str) and value not in DTYPES:
        raise OptionError("dtype", f'is one of {", ".join(DTYPES)}, not "{value:.60}"')


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Every option of a live model; a value that an option does not take is refused here, in one line."""

    model: str | Path | None = option(
        None,
        help="A folder, a hub id, a GGUF file (also folder:file.gguf), or a name that hotset models lists; none: the "
        "small model that ships with hotset.",
        argument=True,
        places=Place.COMMAND | Place.FILE,
    )
    memory: str | Budget = option(
        AUTO,
        help='Memory for experts: "8GiB", "25%" of them, "1536 slots" (a slot holds one expert), or auto.',
        group=_CACHE,
        check=budget_or_auto,
        example=_AMOUNTS,
    )
    process_memory: str | None = option(
        None,
        help='Memory for the whole process, such as "2GiB": that for experts is derived from it. On a CPU.',
        group=_CACHE,
        unit="SIZE",
        places=_COMMANDS,
        check=parse_memory,
        example='"2GiB"',
    )
    host_memory: str | Budget = option(
        AUTO,
        help="Host memory for experts, behind that of a GPU: a size, a share, slots, or auto.",
        group=_CACHE,
        check=budget_or_auto,
        example=_AMOUNTS,
    )
    context: int = option(
        CONTEXT_TOKENS,
        help="Leave room for so many tokens of prompt and answer, over all prompts that are computed together.",
        group=_CACHE,
        unit="TOKENS",
        least=1,
        most=MAX_CONTEXT,
    )
    policy: str = option(
        DEFAULT_POLICY,
        help="Which expert to evict for another (the eviction policy), with options as in "
        '"decay:half_life=8"; auto: nextuse on a CPU, blend on a GPU, or lru where that does better.',
        group=_CACHE,
        check=_check_policy_or_auto,
    )
    host_policy: str = option(
        DEFAULT_POLICY,
        help="Eviction policy of host memory, behind that of a GPU.",
        group=_CACHE,
        check=check_policy,
    )
    scope: str = option("layer", help="Slots belong to each layer, or to one pool.", group=_CACHE, choices=SCOPES)
    staging: int | None = option(
        None,
        help="Slots that experts without a slot of the cache pass through; for batches on a GPU, batch x top_k.",
        group=_CACHE,
        unit="SLOTS",
        least=1,
        most=65_536,
    )
    threads: int = option(
        0,
        help="Threads that read experts from disk; 0: as many as suit the machine.",
        group=_CACHE,
        least=0,
        most=1024,
    )
    prefetch: str = option(
        AUTO,
        help="Read experts before they are needed (prefetch), by this forecast: auto (the next layer's router, where "
        "it pays), off, gate, best, ...",
        group=_CACHE,
        check=_check_prefetch,
    )
    device: str = option(AUTO, help="auto, cpu, cuda or cuda:N.", group=_CACHE, places=Place.ALL ^ Place.ATTACH)
    engine: str = option(
        AUTO,
        help="What drives a GPU; auto: the device where it can.",
        group=_CACHE,
        choices=tuple(DriverChoice),
    )
    dtype: Any = option(
        AUTO,
        help="auto (as stored), bfloat16, float16 or float32.",
        group=_CACHE,
        check=_check_dtype,
        places=Place.ALL ^ Place.ATTACH,
    )
    experts: str = option(
        AUTO,
        help="Experts in memory: auto (in the checkpoint's own format), or dense (expanded to plain numbers).",
        group=_CACHE,
        choices=EXPERTS,
        places=Place.ALL ^ Place.ATTACH,
    )
    force: bool = option(
        False,
        help="Try a budget that memory does not seem to hold; overwrite an output that exists.",
        group=_CACHE,
        places=Place.ALL ^ Place.FILE,
    )
    profile: str | Path | None = option(
        None, help="Start warm from this profile: a name or a path.", group=_LEARNING, unit="NAME"
    )
    learn: str | Path | None = option(
        None,
        help="Keep what is learnt in this profile, and start from it if it exists.",
        group=_LEARNING,
        unit="NAME",
    )
    learn_every: float = option(
        5.0,
        help="How often to save it.",
        group=_LEARNING,
        unit="MINUTES",
        least=1e-6,
        most=1e6,
        formerly={"learn_every_s": lambda seconds: seconds / 60},
    )
    prior_tokens: int = option(
        PRIOR_TOKENS,
        help="How many tokens of evidence a profile is worth.",
        group=_LEARNING,
        unit="TOKENS",
        least=0,
        most=10**9,
        formerly={"prior": None},
    )
    allow_foreign: bool = option(
        False, help="Use a profile of other weights, as of a fine-tune of this model.", group=_LEARNING
    )
    pin: str | None = option(
        None,
        help='Pin the hottest experts of the profile: "20%" of the slots, or "64 slots".',
        group=_LEARNING,
        unit="SHARE",
        check=pin_share,
    )
    warm_pin: int | str = option(
        OFF,
        help="Observe so many tokens, then protect what they used most if a trial says it pays: a number, auto or off.",
        group=_LEARNING,
        unit="TOKENS",
        least=0,
        check=_check_warm_pin,
    )
    trust_remote_code: bool = option(
        False,
        help="Run Python code that a model brings along; never without this option.",
        group=_MODEL,
        places=Place.LOAD | Place.COMMAND,  # not of a file that happens to lie in a folder
    )
    quiet: bool = option(
        False, help="Say nothing but the text and errors.", group=MESSAGES, short="-q", places=_COMMANDS
    )
    verbose: bool = option(
        False, help="Say what is done as it is done, with times.", group=MESSAGES, short="-v", places=_COMMANDS
    )
    log_file: str | Path | None = option(
        None,
        help="Add all messages to this file, with time and level; never a prompt or an answer.",
        group=MESSAGES,
        unit="FILE",
        places=_COMMANDS,
    )
    log_json: bool = option(False, help="Write the lines of the log file as JSON.", group=MESSAGES, places=_COMMANDS)
    spill: str | Path | None = option(
        None, help="The folder for the experts of an attached model.", group=_MODEL, places=Place.ATTACH
    )
    auto_class: Any = option(
        None, help="The class to load with; AutoModelForCausalLM.", group=_MODEL, places=Place.LOAD
    )
    from_pretrained: Mapping[str, Any] | None = option(
        None, help="More keywords for from_pretrained.", group=_MODEL, places=Place.LOAD
    )

    def __post_init__(self) -> None:
        put(self, policy=_named(self.policy), host_policy=_named(self.host_policy))
        put(self, prefetch=_named(self.prefetch, "forecast"))
        check_all(self)

    @property
    def name(self) -> str:
        """What to call the model."""
        if self.model is None:
            return "reference"
        return Path(self.model).name if Path(self.model).is_dir() else str(self.model)

    def policy_on(self, device_type: str) -> str:
        """The policy to begin with on a device; auto is nextuse on a CPU, where what it costs is next to nothing.

        A GPU that drives itself has no kernel of it, and one that the host drives has not been measured with it.
        """
        if self.policy != AUTO:
            return self.policy
        return "nextuse" if device_type == "cpu" else "blend"

    @property
    def switches_policy(self) -> bool:
        """Whether to switch between the policy and lru, whichever does better."""
        return self.policy == AUTO
