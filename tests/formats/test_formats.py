"""Weight formats: what a matrix takes, what comes out of it, and who is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from rows8 import Rows8, encoded  # noqa: E402

from hotset import formats  # noqa: E402
from hotset.errors import FormatError  # noqa: E402
from hotset.formats.dense import Dense  # noqa: E402
from hotset.store import Matrix, Part, SlotLayout  # noqa: E402


@pytest.fixture
def _rows8():  # type: ignore[no-untyped-def]
    undo = formats.register(Rows8)
    yield
    undo()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("transposed", [False, True])
def test_dense_is_one_tensor_used_where_it_lies(dtype: str, transposed: bool) -> None:
    dense = Dense(dtype, transposed)
    (part,) = dense.parts(6, 10)
    assert part == ("", (10, 6) if transposed else (6, 10), dtype)
    assert dense.size_bytes(6, 10) == 60 * formats.element_type(dtype).itemsize
    matrix = torch.randn(part.shape).to(formats.element_type(dtype))
    operand = dense.operand([matrix])
    assert operand.data_ptr() == matrix.data_ptr()
    assert operand.shape == (10, 6)
    assert dense.shape([matrix]) == (6, 10)
    x, out = torch.randn(3, 10).to(matrix.dtype), torch.empty(3, 6, dtype=matrix.dtype)
    dense.product(x, operand, out)
    assert torch.equal(out, torch.mm(x, matrix if transposed else matrix.T))
    numbers = torch.empty(6, 10, dtype=matrix.dtype)
    dense.decode([matrix], numbers)
    assert torch.equal(numbers, matrix.T if transposed else matrix)
    rows = torch.randn(4, *part.shape).to(matrix.dtype)
    stacked = dense.stacked([rows])
    assert stacked is not None
    assert torch.equal(stacked[2], dense.operand([rows[2]]))


@pytest.mark.parametrize("spec", ["dense", "dense:dtype=float32", "dense:dtype=float16,transposed=on"])
def test_a_format_is_written_as_it_is_read(spec: str) -> None:
    assert formats.parse(spec).spec == spec
    assert "dense" in formats.names()


@pytest.mark.parametrize(
    "spec",
    [
        "", "nonsense", "base", "_dense_tiles", "__init__", "../dense", "dense\0", "os", "dense.dense", "Dense",
        " dense", "dense:dtype", "dense:dtype=", "dense:dtype=float31", "dense:dtype=__class__", "dense:name=x",
        "dense:transposed=1", "dense:transposed=maybe", "dense:dtype=float32,dtype2=x", "dense:" + "x" * 300,
        "rows8", None, 7, b"dense", ["dense"],
    ],
)  # fmt: skip
def test_hostile_names_are_refused_in_a_line(spec: object) -> None:
    with pytest.raises(FormatError) as caught:
        formats.parse(spec)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("number", ["-1", "1e3", "٣", "99999999999", "1_0", " 1", ""])
@pytest.mark.usefixtures("_rows8")
def test_numbers_are_plain_and_bounded(number: str) -> None:
    with pytest.raises(FormatError):
        formats.parse(f"rows8:multiple={number}")


@pytest.mark.usefixtures("_rows8")
def test_a_registered_format_is_found_by_name_and_taken_back() -> None:
    assert "rows8" in formats.names()
    found = formats.parse("rows8:dtype=float32,multiple=16")
    assert found == Rows8("float32", 16)
    assert found.spec == "rows8:dtype=float32,multiple=16"
    with pytest.raises(FormatError, match="taken"):
        formats.register(Rows8)


def test_what_was_taken_back_is_unknown() -> None:
    formats.register(Rows8)()
    with pytest.raises(FormatError, match="no weight format is called 'rows8'"):
        formats.parse("rows8")


def test_a_matrix_in_several_parts() -> None:
    toy = Rows8("float32")
    assert toy.size_bytes(6, 10) == 6 * 10 + 6 * 4
    matrix = torch.randn(6, 10)
    parts = encoded(matrix)
    assert [(tuple(p.shape), p.dtype) for p in parts] == [
        (part.shape, formats.element_type(part.dtype)) for part in toy.parts(6, 10)
    ]
    numbers = torch.empty(6, 10)
    toy.decode(parts, numbers)
    assert (numbers - matrix).abs().max() <= matrix.abs().max() / 127
    x, out = torch.randn(3, 10), torch.empty(3, 6)
    toy.product(x, toy.operand(parts), out)
    assert torch.equal(out, x @ numbers.T)
    assert torch.equal(toy.matrix(parts), numbers.T)
    assert toy.stacked([torch.zeros(1)]) is None
    with pytest.raises(FormatError, match="10 inputs are no multiple of 16"):
        Rows8("float32", 16).parts(6, 10)


def test_matrices_below_each_other() -> None:
    toy = Rows8("float32")
    first, second = torch.randn(4, 8), torch.randn(6, 8)
    assert toy.stacks([4, 6], 8)
    out = [torch.empty(10, 8, dtype=torch.int8), torch.empty(10)]
    toy.fill([(toy, encoded(first)), (toy, encoded(second))], out)
    assert torch.equal(toy.matrix(out), toy.matrix(encoded(torch.cat([first, second]))))


@pytest.mark.usefixtures("_rows8")
def test_a_layout_knows_what_its_matrices_are_made_of() -> None:
    parts, matrix = formats.laid_out("up", Rows8("float32"), 6, 10)
    assert [part.name for part in parts] == ["up:values", "up:scales"]
    assert matrix == Matrix("up", 6, 10, "rows8:dtype=float32", ("up:values", "up:scales"))
    plain, none = formats.laid_out("down", Dense("float32"), 10, 6)
    assert none is None
    layout = SlotLayout.of([*parts, *plain], [matrix])
    weight = formats.weight_of(layout, "up")
    assert (weight.format, weight.outputs, weight.inputs) == (Rows8("float32"), 6, 10)
    assert [part.offset for part in weight.parts] == [0, 64]
    down = formats.weight_of(layout, "down")
    assert (down.format, down.outputs, down.inputs, down.parts) == (Dense("float32"), 10, 6, (layout.part("down"),))
    turned = formats.weight_of(layout, "down", transposed=True)
    assert (turned.format, turned.outputs, turned.inputs) == (Dense("float32", transposed=True), 6, 10)


@pytest.mark.usefixtures("_rows8")
@pytest.mark.parametrize("wrong", [Part("up:scales", (7,), "float32"), Part("up:scales", (6,), "float16")])
def test_parts_that_are_not_the_format_s_are_refused(wrong: Part) -> None:
    (values, _), matrix = formats.laid_out("up", Rows8("float32"), 6, 10)
    assert matrix is not None
    with pytest.raises(FormatError, match="not those of a matrix in rows8"):
        formats.weight_of(SlotLayout.of([values, wrong], [matrix]), "up")


@pytest.mark.parametrize("name", ["float31", "Tensor", "nn", "__class__", ""])
def test_types_that_are_none(name: str) -> None:
    with pytest.raises(FormatError):
        formats.element_type(name)


def test_parts_and_bytes_need_no_torch() -> None:
    code = (
        "import sys; from hotset import formats\n"
        "print(formats.parse('dense:dtype=float16').size_bytes(3, 5), 'torch' in sys.modules, 'triton' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["30", "False", "False"]
