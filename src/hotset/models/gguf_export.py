"""A GGUF model without its experts as files of transformers: what a pack of it has beside the experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hotset.models.gguf_checkpoint import GgufCheckpoint
from hotset.store.dense import HeldTensor
from hotset.store.header import StoredTensor


@contextmanager
def small_files_of(model: Any, gguf: GgufCheckpoint) -> Iterator[Path]:
    """A folder with config, generation config and tokenizer, as transformers saves them, for the length of a block."""
    with TemporaryDirectory(prefix="hotset-") as place:
        model.config.save_pretrained(place)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(place)
        gguf.tokenizer().save_pretrained(place)
        yield Path(place)


def weights_of(model: Any) -> dict[str, StoredTensor]:
    """The weights in memory, by their names; of those that are tied to each other, the first."""
    found: dict[str, StoredTensor] = {}
    seen = set()
    for name, tensor in model.state_dict().items():
        if tensor.is_meta or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[name] = HeldTensor(Path(), dtype, tuple(tensor.shape), 0, data.nbytes, name, data=data)
    return found
