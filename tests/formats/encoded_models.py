"""Tiny checkpoints with experts in the tests' own format, and the same numbers written out as plain ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import rows8
import torch
from safetensors.torch import load_file, save_file

EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")


def encode(source: Path, target: Path) -> Path:
    """A copy of a checkpoint with its experts in rows8."""
    return rewrite(source, target, lambda name, matrix: _encoded(name, matrix))


def decoded(source: Path, target: Path) -> Path:
    """A copy of a checkpoint with its experts as they are once they were in rows8."""
    return rewrite(source, target, lambda name, matrix: {name: _back(matrix)})


def _encoded(name: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    values, scales = rows8.encoded(matrix)
    return {name: values, f"{name}_scale": scales}


def _back(matrix: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(matrix)
    rows8.Rows8().decode(rows8.encoded(matrix), out)
    return out


def rewrite(source: Path, target: Path, change, which: re.Pattern[str] = EXPERT) -> Path:  # type: ignore[no-untyped-def]
    """A copy of a checkpoint with some matrices as `change` makes them of name and matrix."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        tensors |= change(name, tensor) if which.search(name) else {name: tensor}
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def edit_config(folder: Path, **changes: object) -> None:
    """Change what a checkpoint's config says."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
