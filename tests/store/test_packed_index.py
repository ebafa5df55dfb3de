"""A packed store opens as it was written, and an index that is cut, edited or forged is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import block, forge, plan_of, write_pack

from hotset.errors import StoreError
from hotset.store import PAGE_BYTES, Matrix, Part, SlotLayout
from hotset.store.pack import without_gaps
from hotset.store.packed import BLOCKS_FILE, INDEX_FILE, is_packed, open_index, open_packed, write_quality
from hotset.store.plan import PackKey, PackLayer, PackPlan
from hotset.transfer import Readers, ReadTransfer
from hotset.transfer.file import aligned_buffer
from hotset.transfer.reads import Load

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    write_pack(tmp_path / "pack")
    return tmp_path / "pack"


def test_every_expert_is_one_aligned_read_of_the_bytes_that_went_in(pack: Path) -> None:
    plan, catalog = plan_of(), open_packed(pack)
    slot = np.frombuffer(aligned_buffer(catalog.slot_bytes), np.uint8)
    readers = Readers(catalog, lambda _: slot)
    for key in plan.keys():  # noqa: SIM118
        (segment,) = catalog.layers[key.layer].experts[key.expert]
        assert segment.offset % PAGE_BYTES == segment.size_bytes % PAGE_BYTES == segment.target == 0
        transfer = ReadTransfer()
        readers.start(transfer, [Load(key.layer, key.expert, 0)])
        transfer.wait_any()
        layout = plan.layers[key.layer].layout
        for part in layout.parts:
            where = slice(part.offset, part.offset + part.size_bytes)
            assert np.array_equal(slot[where], block(plan, key)[where])
    readers.close()
    assert (pack / BLOCKS_FILE).stat().st_size == plan.end_bytes
    assert catalog.meta["dtype"] == "bfloat16"


def test_gaps_between_parts_are_zeros_so_that_equal_weights_are_equal_packs() -> None:
    plan, key = plan_of(), PackKey(0, 0)
    layout, raw = plan.layers[0].layout, block(plan_of(), PackKey(0, 0))
    gap = slice(layout.parts[0].size_bytes, layout.parts[1].offset)
    assert raw[gap].any()
    assert not without_gaps(layout, raw)[gap].any()
    assert plan.used_bytes(key) == len(raw)


def test_is_packed(pack: Path, tmp_path: Path) -> None:
    assert is_packed(pack)
    assert not is_packed(tmp_path)
    (pack / INDEX_FILE).unlink()
    assert is_packed(pack), "a pack that lost its index is still no ordinary checkpoint"
    with pytest.raises(StoreError, match=r"cannot read .*experts\.json.*pack the model again"):
        open_packed(pack)


@pytest.mark.parametrize("change", [-1, -PAGE_BYTES, 1])
def test_a_file_of_another_size_is_refused(pack: Path, change: int) -> None:
    path = pack / BLOCKS_FILE
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size + change)
    with pytest.raises(StoreError, match="is truncated: it has" if change < 0 else "is of another pack"):
        open_packed(pack)


def test_a_missing_file_of_blocks_is_named(pack: Path) -> None:
    (pack / BLOCKS_FILE).unlink()
    with pytest.raises(StoreError, match=r"cannot read .*experts\.hotset"):
        open_packed(pack)


def test_a_hand_edited_index_is_refused_even_if_it_makes_sense(pack: Path) -> None:
    document = json.loads((pack / INDEX_FILE).read_text())
    parts = document["layers"][1]["parts"]
    parts[0]["name"], parts[1]["name"] = parts[1]["name"], parts[0]["name"]
    (pack / INDEX_FILE).write_text(json.dumps(document))
    with pytest.raises(StoreError, match=r"experts\.json is damaged: it was changed .*pack the model again"):
        open_packed(pack)


def test_spacing_and_order_do_not_matter(pack: Path) -> None:
    document = json.loads((pack / INDEX_FILE).read_text())
    before = open_packed(pack)
    (pack / INDEX_FILE).write_text(json.dumps(document, sort_keys=True))
    assert open_packed(pack).layers == before.layers


def test_every_truncation_of_the_index_is_refused(pack: Path) -> None:
    text = (pack / INDEX_FILE).read_bytes()
    for kept in [*range(0, len(text) - 2, 37), len(text) - 2]:
        (pack / INDEX_FILE).write_bytes(text[:kept])
        with pytest.raises(StoreError, match=r"experts\.json is damaged"):
            open_packed(pack)


def layer(document: dict[str, Any]) -> Any:
    return document["layers"][0]


EDITS: dict[str, Edit] = {
    "another format": lambda d: d.update(format="zip"),
    "a later version": lambda d: d.update(version=2),
    "a version that is true": lambda d: d.update(version=True),
    "no layers": lambda d: d.update(layers=[]),
    "layers that are a number": lambda d: d.update(layers=7),
    "a layer that is null": lambda d: d["layers"].append(None),
    "a layer less, so that the file is too long": lambda d: d["layers"].pop(),
    "no source": lambda d: d.pop("source"),
    "no files": lambda d: d.pop("files"),
    "a file elsewhere": lambda d: d["files"].update({"../../etc/passwd": {"bytes": 1, "digest": "00" * 16}}),
    "a file of zero bytes in its name": lambda d: d["files"].update({"a\0b": {"bytes": 1, "digest": "00" * 16}}),
    "a small file elsewhere": lambda d: d["small"].update({"../config.json": {"bytes": 1, "digest": "00" * 16}}),
    "a small file at the root": lambda d: d["small"].update({"/etc/passwd": {"bytes": 1, "digest": "00" * 16}}),
    "a small file far below": lambda d: d["small"].update({"a/b/c": {"bytes": 1, "digest": "00" * 16}}),
    "small files in a list": lambda d: d.update(small=[]),
    "a chunk less": lambda d: d["files"]["model.safetensors"].update(chunks=[]),
    "chunks that are a number": lambda d: d["files"]["model.safetensors"].update(chunks=1),
    "a file of negative size": lambda d: d["files"]["model.safetensors"].update(bytes=-1),
    "more experts than digests": lambda d: layer(d).update(experts=10**12),
    "no experts": lambda d: layer(d).update(experts=0, digests=[]),
    "experts in a word": lambda d: layer(d).update(experts="5"),
    "a digest too short": lambda d: layer(d)["digests"].__setitem__(0, "00"),
    "a digest of other letters": lambda d: layer(d)["digests"].__setitem__(0, "zz" * 16),
    "a digest that is a number": lambda d: layer(d)["digests"].__setitem__(0, 5),
    "an offset elsewhere": lambda d: layer(d).update(offset=4096),
    "blocks that overlap": lambda d: d["layers"][1].update(block_bytes=0),
    "no parts": lambda d: layer(d).update(parts=[]),
    "two parts of one name": lambda d: layer(d)["parts"][1].update(name="up"),
    "a part at an odd place": lambda d: layer(d)["parts"][1].update(offset=66),
    "a part before the block": lambda d: layer(d)["parts"][0].update(offset=-64),
    "an unknown type": lambda d: layer(d)["parts"][0].update(dtype="float31"),
    "a shape of no dimension": lambda d: layer(d)["parts"][0].update(shape=[]),
    "a shape of many dimensions": lambda d: layer(d)["parts"][0].update(shape=[1] * 1000),
    "a size of nothing": lambda d: layer(d)["parts"][0].update(shape=[0, 11]),
    "a huge size": lambda d: layer(d)["parts"][0].update(shape=[2**59, 2**59]),
    "a size that is half": lambda d: layer(d)["parts"][0].update(shape=[1.5, 11]),
    "a size that is true": lambda d: layer(d)["parts"][0].update(shape=[True, 11]),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_forged_claims_are_refused(pack: Path, edit: Edit) -> None:
    document = json.loads((pack / INDEX_FILE).read_text())
    edit(document)
    forge(pack / INDEX_FILE, document)
    with pytest.raises(StoreError, match=r"experts\.(json|hotset) is .*pack the model again"):
        open_packed(pack)


ENCODED = SlotLayout.of(
    [Part("up:values", (4, 8), "int8"), Part("up:scales", (4,), "float32"), Part("down", (8, 4), "bfloat16")],
    [Matrix("up", 4, 8, "some format:group=8", ("up:values", "up:scales"))],
)


@pytest.fixture
def encoded(tmp_path: Path) -> Path:
    """A pack with a matrix in a format; whether anybody knows it is not for the store to say."""
    layers = (PackLayer("model.layers.0.experts", ENCODED, 3),)
    write_pack(tmp_path / "encoded", PackPlan(layers, plan_of().meta))
    return tmp_path / "encoded"


def test_formats_are_kept_as_they_were_written(encoded: Path) -> None:
    assert open_packed(encoded).layers[0].layout == ENCODED
    assert json.loads((encoded / INDEX_FILE).read_text())["version"] == 2


def matrix(document: dict[str, Any]) -> Any:
    return layer(document)["matrices"][0]


MATRIX_EDITS: dict[str, Edit] = {
    "the version of packs without": lambda d: d.update(version=1),
    "no matrix": lambda d: layer(d).update(matrices=[]),
    "matrices in a word": lambda d: layer(d).update(matrices="up"),
    "a matrix that is null": lambda d: layer(d)["matrices"].append(None),
    "two of one name": lambda d: layer(d)["matrices"].append(dict(matrix(d), parts=["down"])),
    "two of one part": lambda d: layer(d)["matrices"].append(dict(matrix(d), name="other")),
    "the name of a part beside it": lambda d: matrix(d).update(name="down"),
    "a part that is not there": lambda d: matrix(d).update(parts=["up:values", "up:zeros"]),
    "a part that is a number": lambda d: matrix(d).update(parts=[0]),
    "no parts at all": lambda d: matrix(d).update(parts=[]),
    "no outputs": lambda d: matrix(d).update(outputs=0),
    "inputs without end": lambda d: matrix(d).update(inputs=2**70),
    "outputs that are true": lambda d: matrix(d).update(outputs=True),
    "a format of no letters": lambda d: matrix(d).update(format=""),
    "a format of many letters": lambda d: matrix(d).update(format="x" * 10_000),
    "a format that is no text": lambda d: matrix(d).update(format=["dense"]),
    "a format with a line's end": lambda d: matrix(d).update(format="dense\nerror: none"),
}


@pytest.mark.parametrize("edit", MATRIX_EDITS.values(), ids=MATRIX_EDITS.keys())
def test_forged_matrices_are_refused(encoded: Path, edit: Edit) -> None:
    document = json.loads((encoded / INDEX_FILE).read_text())
    edit(document)
    forge(encoded / INDEX_FILE, document)
    with pytest.raises(StoreError, match=r"experts\.json is .*pack the model again"):
        open_packed(encoded)


@pytest.mark.parametrize("text", [b"[" * 200_000, b"null", b"\xff\x00", b"9" * 9999, b'{"format": NaN}', b""])
def test_what_is_no_index_is_refused(pack: Path, text: bytes) -> None:
    (pack / INDEX_FILE).write_bytes(text)
    with pytest.raises(StoreError, match=r"experts\.json is damaged"):
        open_packed(pack)


def test_a_huge_index_is_not_read(pack: Path) -> None:
    with (pack / INDEX_FILE).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="larger than"):
        open_packed(pack)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data(), value=values)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_anywhere_is_refused_or_opens(pack: Path, data: st.DataObject, value: Any) -> None:
    original = (pack / INDEX_FILE).read_bytes()
    document = json.loads(original)
    where: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
        if not isinstance(where[key], dict | list) or not where[key] or data.draw(st.integers(0, 2)) == 0:
            break
        where = where[key]
    where[key] = value
    try:
        forge(pack / INDEX_FILE, document)
        open_packed(pack)
    except StoreError:
        pass
    finally:
        (pack / INDEX_FILE).write_bytes(original)


QUALITY = {
    "text": {"name": "a text", "sha256": "ab" * 32, "tokens": 300},
    "dtype": "bfloat16",
    "tokens": 299, "kl_mean": 0.02, "kl_p99": 0.2, "same_top": 0.92, "perplexity": 8.1, "packed_perplexity": 8.2,
}  # fmt: skip


def test_quality_is_kept_beside_all_else(pack: Path) -> None:
    before = open_index(pack)
    assert before.quality is None
    write_quality(pack, QUALITY)
    after = open_index(pack)
    assert after.quality == QUALITY
    assert (after.plan, after.digests, after.files, after.small) == (
        before.plan, before.digests, before.files, before.small,
    )  # fmt: skip


@pytest.mark.parametrize(
    "edit",
    [
        lambda q: q.pop("text"), lambda q: q.update(text=3), lambda q: q.pop("kl_p99"), lambda q: q.update(tokens=0),
        lambda q: q.update(kl_mean="0.1"), lambda q: q.update(kl_mean=True), lambda q: q.update(perplexity=-1.0),
        lambda q: q.update(perplexity=float("inf")), lambda q: q.update(parts={"it": {}}), lambda q: q.update(parts=[]),
        lambda q: q["text"].update(name="\x1b[2J"), lambda q: q["text"].update(sha256="a" * 999),
    ],
)  # fmt: skip
def test_quality_that_cannot_be_is_refused(pack: Path, edit: Edit) -> None:
    document = json.loads((pack / INDEX_FILE).read_text())
    document["quality"] = json.loads(json.dumps(QUALITY))
    edit(document["quality"])
    forge(pack / INDEX_FILE, document)
    with pytest.raises(StoreError, match="is damaged"):
        open_index(pack)
