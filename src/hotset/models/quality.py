"""How far a pack is from the model that it was made of: both teacher-forced over the same text, one after the other.

The logits of the original wait on the disk in the type they are computed in, so that only one model is in memory.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hotset.errors import HotsetError
from hotset.files import write_beside
from hotset.models.load import load_model
from hotset.models.windows import LOGIT_BYTES, PASS_TOKENS, TokenText, Window, logits_of
from hotset.options import RunOptions
from hotset.shape import format_size
from hotset.store.packed import open_index, write_quality

Tensor = torch.Tensor
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Distances:
    """Of some scored tokens: the divergence from the original, whether both expect the same token, and both losses."""

    divergence: Tensor
    same_top: Tensor
    loss: Tensor
    packed_loss: Tensor

    @classmethod
    def between(cls, original: Tensor, packed: Tensor, ids: Tensor) -> Distances:
        """From the logits [tokens, vocabulary] of a window; those of its last token predict nothing that is known."""
        p, q = (torch.log_softmax(logits[:-1].float(), -1) for logits in (original, packed))
        divergence = (
            (p.exp() * (p - q)).nan_to_num(0.0).sum(-1).clamp(min=0)
        )  # a logit of minus infinity counts nothing
        nexts = ids[1:, None]
        return cls(
            divergence.cpu(),
            (p.argmax(-1) == q.argmax(-1)).float().cpu(),
            -p.gather(-1, nexts)[:, 0].cpu(),
            -q.gather(-1, nexts)[:, 0].cpu(),
        )

    @classmethod
    def joined(cls, many: Sequence[Distances]) -> Distances:
        """Those of several windows."""
        fields = ("divergence", "same_top", "loss", "packed_loss")
        return cls(*(torch.cat([getattr(one, name) for one in many]) for name in fields))

    def summary(self) -> dict[str, float]:
        """The figures that a person compares."""
        return {
            "tokens": len(self.divergence),
            "kl_mean": _figure(self.divergence.mean()),
            "kl_p99": _figure(self.divergence.quantile(0.99)),
            "same_top": _figure(self.same_top.mean()),
            "perplexity": _figure(self.loss.mean().exp()),
            "packed_perplexity": _figure(self.packed_loss.mean().exp()),
        }


def measure(
    original: str, packed: Path, text: TokenText, options: RunOptions, progress: Progress | None = None
) -> dict[str, Any]:
    """Compare a pack with its original, write the result into the pack, and return it.

    Given again after an interrupt, it goes on with the logits of the original that are there.
    """
    from transformers import AutoConfig

    plan = open_index(packed).plan
    config = AutoConfig.from_pretrained(packed, trust_remote_code=options.trust_remote_code)
    vocabulary = int(config.get_text_config().vocab_size)
    passes, tell = text.passes(vocabulary), progress or (lambda *_: None)
    options = replace(options, context=max(options.context, PASS_TOKENS))
    owner = json.dumps([plan.meta, text.sha256, text.tokens], sort_keys=True)
    waiting = WaitingLogits(packed.with_name(packed.name + ".quality"), owner)
    waiting.check_room(text.tokens * vocabulary * LOGIT_BYTES)
    first = waiting.present(len(passes))
    done = sum(_tokens(windows) for windows in passes[:first])
    if first < len(passes):
        with _loaded(original, options) as model:
            for number in range(first, len(passes)):
                waiting.keep(number, logits_of(model, passes[number]))
                done += _tokens(passes[number])
                tell(done, 2 * text.tokens)
    found: list[tuple[str, Distances]] = []
    with _loaded(str(packed), replace(options, dtype="auto")) as model:
        for number, windows in enumerate(passes):
            found += _compared(windows, waiting.logits(number), logits_of(model, windows))
            done += _tokens(windows)
            tell(done, 2 * text.tokens)
    result = document(text, found, plan.meta.get("dtype", ""))
    write_quality(packed, result)
    waiting.remove()
    return result


def document(text: TokenText, found: Sequence[tuple[str, Distances]], dtype: str) -> dict[str, Any]:
    """What a pack keeps: what was compared, and the figures over all of it and by its parts."""
    labels = list(dict.fromkeys(label for label, _ in found))
    parts = {label: Distances.joined([one for own, one in found if own == label]).summary() for label in labels}
    compared = {"name": text.name, "sha256": text.sha256, "tokens": text.tokens}
    whole = Distances.joined([one for _, one in found]).summary()
    return {"text": compared, "dtype": dtype} | whole | ({"parts": parts} if len(parts) > 1 else {})


class WaitingLogits:
    """Logits of the original, a file for each pass, in a folder beside the pack until both were compared."""

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder, self.owner = folder, owner

    def check_room(self, needed_bytes: int) -> None:
        """Refuse to begin what the disk cannot hold."""
        free = shutil.disk_usage(self.folder.parent).free
        if needed_bytes > free:
            raise HotsetError(
                f"the logits that quality is measured by need up to {format_size(needed_bytes)} beside the pack and "
                f"{format_size(free)} are free: free some space and give the command again, or add --no-quality"
            )

    def present(self, passes: int) -> int:
        """How many passes, from the first on, an earlier run of the same comparison has left."""
        from safetensors import safe_open

        for number in range(passes):
            try:
                with safe_open(self._file(number), framework="pt") as file:
                    if (file.metadata() or {}).get("owner") != self.owner:
                        return number
            except Exception:  # not there, or damaged
                return number
        return passes

    def keep(self, number: int, logits: Tensor) -> None:
        """Keep the logits of one pass."""
        from safetensors.torch import save_file

        self.folder.mkdir(exist_ok=True)
        with write_beside(self._file(number)) as scratch:
            save_file({"logits": logits.cpu().contiguous()}, scratch, {"owner": self.owner})

    def logits(self, number: int) -> Tensor:
        """The logits of one pass."""
        from safetensors.torch import load_file

        return load_file(self._file(number))["logits"]

    def remove(self) -> None:
        """Remove what is ours."""
        for file in self.folder.glob("pass-*.safetensors"):
            file.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def _file(self, number: int) -> Path:
        return self.folder / f"pass-{number:05d}.safetensors"


def _compared(windows: Sequence[Window], original: Tensor, packed: Tensor) -> list[tuple[str, Distances]]:
    found = []
    for window, one, other in zip(windows, original, packed, strict=True):
        ids = torch.tensor(window.ids, device=other.device)
        if len(ids) > 1:
            distances = Distances.between(one[: len(ids)].to(other.device), other[: len(ids)], ids)
            found.append((window.label, distances))
    return found


@contextmanager
def _loaded(model: str, options: RunOptions) -> Iterator[Any]:
    """A model for the length of a block; its memory is free afterwards."""
    loaded = load_model(model, options, None)
    loaded.eval()
    try:
        yield loaded
    finally:
        loaded.hotset.close()
        del loaded
        gc.collect()


def _tokens(windows: Sequence[Window]) -> int:
    return sum(len(window.ids) for window in windows)


def _figure(value: Tensor) -> float:
    """A number with as many digits as mean something; one that is none is refused here, not in the pack's readers."""
    number = float(value)
    if not math.isfinite(number):
        raise HotsetError("the model's probabilities are not finite, so that quality cannot be measured: --no-quality")
    return float(f"{number:.6g}")
