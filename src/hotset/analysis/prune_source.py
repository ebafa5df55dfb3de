"""The checkpoint that is pruned: its config, its routers' rules, and its files beside the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.analysis.prune_choice import RouterRules
from hotset.analysis.prune_families import check_family, rules_of
from hotset.analysis.prune_plan import Checkpoint
from hotset.errors import ModelError
from hotset.models.fingerprint import fingerprint_of_folder
from hotset.models.gguf_place import is_gguf
from hotset.models.pack_files import small_files, source_folder
from hotset.profile import Fingerprint
from hotset.reading import parse_bounded
from hotset.store.packed import is_packed

RECORD_FILE = "hotset_prune.json"
"""What a pruned checkpoint says of itself."""
_NOT_COPIED = {RECORD_FILE, "digest.json", "config.json"}


@dataclass(frozen=True)
class PruneSource:
    """The checkpoint that is pruned."""

    name: str
    place: str
    folder: Path
    checkpoint: Checkpoint
    config: dict[str, Any]
    rules: RouterRules
    trust_remote_code: bool

    @classmethod
    def open(cls, model: str, *, trust_remote_code: bool) -> PruneSource:
        """Look at a checkpoint; what cannot be pruned is refused."""
        if is_gguf(model) or is_packed(Path(model)):
            raise ModelError(f"{model} is a GGUF file or a pack: prune the transformers checkpoint, and pack that")
        folder = source_folder(model)
        config = parse_bounded((folder / "config.json").read_bytes(), values=1 << 20, containers=1 << 18)
        checkpoint = Checkpoint(model, trust_remote_code=trust_remote_code)
        check_family(checkpoint.model, config)
        rules = rules_of(checkpoint.model, checkpoint.moe_layers[0])
        if {moe_layer.experts for moe_layer in checkpoint.moe_layers} != {rules.experts}:
            raise ModelError("the layers of this model have different numbers of experts: it cannot be pruned")
        name = folder.resolve().name if Path(model).exists() else model
        return cls(name, model, folder, checkpoint, config, rules, trust_remote_code)

    @property
    def size_bytes(self) -> int:
        """The bytes of all weights."""
        return sum(tensor.size_bytes for tensor in self.checkpoint.raw.values())

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the model, whose dense weights are read for it."""
        return fingerprint_of_folder(self.place, trust_remote_code=self.trust_remote_code)

    def small_files(self, config: dict[str, Any]) -> dict[str, bytes]:
        """Everything beside the weights, with another config; what speaks of the original's files is left out."""
        config.pop("transformers_weights", None)  # a file that is not in the folder that is written
        found = {str(file.relative_to(self.folder)): file for file in small_files(self.folder)}
        copied = {name: file.read_bytes() for name, file in found.items() if name not in _NOT_COPIED}
        return copied | {"config.json": (json.dumps(config, indent=2) + "\n").encode()}
