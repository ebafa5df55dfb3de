"""Write a checkpoint with each layer's experts in two tensors, as transformers 5 holds them: it then maps them."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotset.files import write_beside

from safetensors_bits import Checkpoint


def fused(checkpoint: Checkpoint, layer: int, experts: int) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Both fused tensors of a layer."""
    prefix = f"model.layers.{layer}.mlp.experts"

    def stack(part: str) -> NDArray[np.uint16]:
        return np.stack([checkpoint.bits(f"{prefix}.{i}.{part}_proj.weight") for i in range(experts)])

    yield f"{prefix}.gate_up_proj", np.concatenate([stack("gate"), stack("up")], axis=1)
    yield f"{prefix}.down_proj", stack("down")


def write(path: Path, tensors: dict[str, NDArray[np.uint16]]) -> None:
    """Write one shard."""
    import torch
    from safetensors.torch import save_file

    values = {name: torch.from_numpy(np.array(bits)).view(torch.bfloat16) for name, bits in tensors.items()}
    with write_beside(path) as scratch:
        save_file(values, scratch, {"format": "pt"})


def fuse(folder: Path, out: Path) -> None:
    """Write one shard per layer and one for the rest, then what makes it a checkpoint."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers, experts = config["num_hidden_layers"], config.get("num_local_experts") or config["num_experts"]
    checkpoint, where = Checkpoint(folder), {}
    out.mkdir(parents=True, exist_ok=True)
    dense = {name: checkpoint.bits(name) for name in checkpoint.names() if ".experts." not in name}
    for i in range(layers + 1):
        shard = dict(fused(checkpoint, i, experts)) if i < layers else dense
        name = f"model-{i + 1:05d}-of-{layers + 1:05d}.safetensors"
        write(out / name, shard)
        where |= dict.fromkeys(shard, name)
    for path in folder.iterdir():
        if not path.name.startswith("model"):
            shutil.copyfile(path, out / path.name)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def main() -> None:
    """Parse and fuse."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    fuse(options.model, options.out)


if __name__ == "__main__":
    main()
