"""Files of prompts: text, JSON and JSON lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotset.generation import read_prompts


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("p.txt", "uno\n\n due \n", ["uno", " due "]),
        ("p.json", '["uno", {"prompt": "due"}]', ["uno", "due"]),
        ("p.json", '{"prompts": ["uno"]}', ["uno"]),
        ("p.jsonl", '"uno"\n\n{"text": "due"}\n', ["uno", "due"]),
    ],
)
def test_files_of_prompts(tmp_path: Path, name: str, content: str, texts: list[str]) -> None:
    (tmp_path / name).write_text(content)
    assert [prompt.text for prompt in read_prompts(tmp_path / name)] == texts


def test_a_workload_that_ships_with_hotset_has_labels() -> None:
    (prompt,) = read_prompts("reference:c", 1)
    assert prompt.labels["domain"] == "c"
