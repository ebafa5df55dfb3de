"""Peer: accelerate's disk offload, computing on the CPU. It needs a checkpoint with fused experts (fuse.py).

accelerate keeps offloaded weights in one of two ways. `dat` is a folder of its own, whose tensors it copies
before every forward, as `accelerate.disk_offload` does; `safetensors` is the checkpoint itself, which a CPU maps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from measure import finish, flags, greedy, prompts


def index_of(folder: Path) -> dict[str, dict[str, str]]:
    """Where each weight lies, as accelerate's loader wants it."""
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: {"safetensors_file": str(folder / file), "weight_name": name} for name, file in where.items()}


def save_folder(folder: Path, out: Path) -> None:
    """Write accelerate's own offload folder, one tensor in memory at a time; done once, outside any memory limit."""
    from accelerate.utils import OffloadedWeightsLoader, offload_weight, save_offload_index

    weights = OffloadedWeightsLoader(index=index_of(folder))
    out.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for name in weights:
        index = offload_weight(weights[name], name, str(out), index)
    save_offload_index(index, str(out))


def is_expert(name: str) -> bool:
    """Whether a weight belongs to an expert."""
    return ".mlp.experts." in name


def offloaded(options: argparse.Namespace) -> Any:
    """The model with its dense weights in memory and hooks that bring every layer's experts for its forward."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset, set_module_tensor_to_device
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(options.model)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=options.experts)
    weights = OffloadedWeightsLoader(index=index_of(options.model))
    for name in weights:
        if not is_expert(name):
            set_module_tensor_to_device(model, name, "cpu", value=weights[name], dtype=torch.bfloat16)
    model.tie_weights()
    if options.keep == "dat":
        weights = OffloadedWeightsLoader(save_folder=str(options.folder))
    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            lazy = PrefixedDataset(weights, f"{name}.")
            hook = AlignDevicesHook("cpu", offload=True, weights_map=lazy, place_submodules=True)
            add_hook_to_module(module, hook)
    return model.eval()


def main() -> None:
    """Prepare the folder where asked; otherwise load, answer, report."""
    parser = flags(__doc__)
    parser.add_argument("--keep", choices=["dat", "safetensors"], default="dat")
    parser.add_argument("--folder", type=Path, help="accelerate's offload folder, for --keep dat")
    parser.add_argument("--prepare", action="store_true", help="only write that folder")
    parser.add_argument("--experts", default="grouped_mm", help="transformers' experts_implementation")
    options = parser.parse_args()
    if options.keep == "dat" and options.folder is None:
        parser.error("--keep dat needs --folder")
    if options.prepare:
        save_folder(options.model, options.folder)
        return
    import torch
    from accelerate import __version__

    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    model = offloaded(options)
    load_s = time.perf_counter() - began
    requests = [greedy(model, ids, options.tokens) for ids in prompts(options)]
    finish(f"accelerate disk ({options.keep})", options, load_s, requests, versions=[torch.__version__, __version__])


if __name__ == "__main__":
    main()
