"""`hotset prune` and `hotset compare` as they are typed: one document, one line where the input is at fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import call

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hotset import reference  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.models import windows  # noqa: E402
from hotset.models.quality import Distances  # noqa: E402

MODEL = reference.path()
SMALL = ("--memory", "50%", "--device", "cpu")


def text(domain: str, path: Path, most: int = 8) -> Path:
    prompts = reference.workload(domain).prompts[:most]
    path.write_text("\n\n".join(one.text for one in prompts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def german(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text("de", tmp_path_factory.mktemp("texts") / "german.txt")


@pytest.fixture(scope="module")
def pruned(german: Path) -> Path:
    """Pruned by a text, with its saliency beside it."""
    out, saved = german.with_name("pruned"), german.with_name("saliency.safetensors")
    words = ("--keep", "75%", "--text", german, "--tokens", "512", "--save-saliency", saved, "-o", out, "--json")
    ended = call("prune", MODEL, *words, *SMALL)
    document = json.loads(ended.out)
    assert (ended.code, document["experts"], document["keep"], document["by"]) == (0, 64, 48, "reap")
    assert document["size_bytes"] == (out / "model.safetensors").stat().st_size < document["original_bytes"]
    assert document["lossy"].startswith("lossy: 16 of 64 experts")
    assert any("fewer than 30 tokens" in line for line in document["notes"])
    assert "fewer than 30 tokens" in ended.err
    kept = [set(layer) for layer in document["kept"]]
    assert all(expert in kept[layer] for layer, expert in document["super_experts"])
    return out


def test_pruned_again_by_what_was_recorded(pruned: Path, tmp_path: Path) -> None:
    saved = pruned.with_name("saliency.safetensors")
    ended = call("prune", MODEL, "--keep", "32", "--by", "msan", "--saliency", saved, "-o", tmp_path / "out")
    assert ended.code == 0
    assert "32 of 64 experts of 8 layers kept by msan" in ended.out
    assert "lossy: 32 of 64 experts" in ended.out
    assert f"hotset compare {MODEL} {tmp_path / 'out'} --text FILE measures what that costs" in ended.out
    assert call("prune", MODEL, "--keep", "75%", "--saliency", saved, "-o", tmp_path / "same").code == 0
    first, same = (json.loads((folder / "hotset_prune.json").read_text()) for folder in (pruned, tmp_path / "same"))
    assert first["kept"] == same["kept"]


def test_saliency_that_no_run_would_record_is_refused(pruned: Path, german: Path, tmp_path: Path) -> None:
    words = ("prune", MODEL, "--keep", "75%", "--text", german, "--tokens", "512", "-o", pruned, *SMALL)
    assert "is there already" in call(*words).out
    kept = tmp_path / "again.safetensors"
    line = call(*words, "--save-saliency", kept).error
    assert f"{pruned} is complete, so nothing runs that --save-saliency would keep: leave it out" in line
    assert not kept.exists()


def test_saliency_is_kept_once_all_is_written_so_that_the_command_can_be_given_again(
    german: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotset.analysis.prune import PruneFolder

    out, saved = tmp_path / "out", tmp_path / "saliency.safetensors"
    words = ("prune", MODEL, "--keep", "75%", "--text", german, "--tokens", "512", "-o", out, *SMALL)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PruneFolder, "write", interrupted)
        assert call(*words, "--save-saliency", saved).code == 130
    assert not saved.exists()
    assert call(*words, "--save-saliency", saved).code == 0
    found = saved.read_bytes()
    assert "pass --force to overwrite it" in call(*words[:-4], "-o", tmp_path / "b", "--save-saliency", saved).error
    again = ("prune", MODEL, "--keep", "50%", "--text", german, "--tokens", "512", "-o", tmp_path / "c", *SMALL)
    assert call(*again, "--save-saliency", saved, "--force").code == 0
    assert saved.read_bytes() == found


@pytest.mark.parametrize(("most", "expected"), [(100, [50, 50]), (300, [150, 150]), (700, [256, 256])])
def test_no_more_tokens_are_judged_by_than_asked_for(tmp_path: Path, most: int, expected: list[int]) -> None:
    from hotset.analysis.saliency_runs import TextFiles
    from hotset.generation.text_model import load_tokenizer

    files = tuple(text(name, tmp_path / f"{name}.txt") for name in ("de", "it"))
    passes = TextFiles(files, most).passes(load_tokenizer(str(MODEL)))
    assert [len(window.ids) for windows in passes for window in windows] == expected
    with pytest.raises(HotsetError, match="--tokens 4 or more"):
        TextFiles(files, 3).passes(load_tokenizer(str(MODEL)))


def test_the_end_of_a_text_counts(tmp_path: Path) -> None:
    from hotset.analysis.saliency_runs import TextFiles
    from hotset.generation.text_model import load_tokenizer

    tokenizer, file = load_tokenizer(str(MODEL)), tmp_path / "short.txt"
    ids = tokenizer(text("de", tmp_path / "de.txt").read_text(), add_special_tokens=False)["input_ids"][:400]
    file.write_text(tokenizer.decode(ids))
    whole = len(tokenizer(file.read_text(), add_special_tokens=False)["input_ids"])
    passes = TextFiles((file,)).passes(tokenizer)
    assert [[len(window.ids) for window in windows] for windows in passes] == [[256], [whole - 256]]


def test_pruned_by_prompts_and_answers(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Il mercato del\nDer Markt\n")
    words = ("--prompts", prompts, "--max-new-tokens", "2", "--by", "gate", "--keep", "50%", "-o", tmp_path / "out")
    document = json.loads(call("prune", MODEL, *words, *SMALL, "--json").out)
    assert document["keep"] == 32
    assert "2 prompts" in json.loads((tmp_path / "out" / "hotset_prune.json").read_text())["text"]


def test_both_models_are_compared(pruned: Path, german: Path, stock: torch.nn.Module) -> None:
    italian = text("it", german.with_name("italian.txt"), 3)
    words = ("compare", MODEL, pruned, "--text", german, "--text", italian, *SMALL)
    ended = call(*words, "--json")
    found = json.loads(ended.out)
    assert set(found["parts"]) == {"german.txt", "italian.txt"}
    assert found["tokens"] == sum(part["tokens"] for part in found["parts"].values())
    assert 0 < found["kl_mean"] < found["kl_p99"]
    assert 0.5 < found["same_top"] < 1
    assert found["other_perplexity"] > found["perplexity"]
    assert "is the text that the experts were chosen by" in ended.err
    lines = call(*words).out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("all texts: perplexity ")


def test_texts_of_one_name_are_told_apart(german: Path, tmp_path: Path) -> None:
    from hotset.analysis.compare import _told_apart
    from hotset.generation.text_model import load_tokenizer
    from hotset.generation.texts import text_of_file

    files = [german, text("it", tmp_path / german.name), text("fr", tmp_path / "french.txt")]
    tokenizer = load_tokenizer(str(MODEL))
    found = _told_apart(files, [text_of_file(file, tokenizer, 256) for file in files])
    names = [str(files[0]), str(files[1]), "french.txt"]
    assert [one.name for one in found] == names
    assert [{window.label for window in one.windows} for one in found] == [{name} for name in names]


def test_one_of_several_texts_that_chose_the_experts_is_named(german: Path, tmp_path: Path) -> None:
    from hotset.analysis.compare import _notes
    from hotset.analysis.saliency_runs import TextFiles
    from hotset.generation.text_model import load_tokenizer
    from hotset.generation.texts import text_of_file

    italian = text("it", tmp_path / "italian.txt")
    (tmp_path / "hotset_prune.json").write_text(json.dumps({"text": TextFiles((german, italian)).name}))
    tokenizer = load_tokenizer(str(MODEL))
    given = [text_of_file(file, tokenizer, 512) for file in (italian, text("fr", tmp_path / "french.txt"))]
    assert _notes(str(tmp_path), given) == [
        "italian.txt is the text that the experts were chosen by: measure on another"
    ]


def test_perplexities_have_no_more_digits_than_are_known() -> None:
    from hotset.cli.compare import _line

    figures = {"kl_mean": 0.5, "kl_p99": 2.0, "same_top": 0.5, "tokens": 9}
    assert "perplexity 514,873 (first 8.025)" in _line(
        "a", figures | {"other_perplexity": 514873.0, "perplexity": 8.02546}
    )


def test_analyze_compares_as_compare_does(pruned: Path, german: Path) -> None:
    words = (MODEL, pruned, "--text", text("it", german.with_name("short.txt"), 2), *SMALL, "--json")
    found, other = (json.loads(call(*name, *words).out) for name in (("compare",), ("analyze", "--compare")))
    assert found == other
    assert "--compare takes two models" in call("analyze", "--compare", MODEL, "--text", german).error
    assert "--compare takes two models" in call("analyze", MODEL, pruned, "--text", german).error


def test_what_is_compared_is_what_stock_computes(pruned: Path, german: Path) -> None:
    from transformers import AutoModelForCausalLM

    from hotset.analysis.compare import compare
    from hotset.generation.text_model import load_tokenizer
    from hotset.generation.texts import text_of_file
    from hotset.options import RunOptions

    options = RunOptions(device="cpu", memory="50%", dtype="float32")
    found = compare(str(MODEL), str(pruned), [german], options, most_tokens=512)
    given = text_of_file(german, load_tokenizer(str(MODEL)), 512)
    logits = [
        windows.logits_of(AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval(), given.windows)
        for place in (MODEL, pruned)
    ]
    ids = [torch.tensor(window.ids) for window in given.windows]
    expected = Distances.joined([Distances.between(*row) for row in zip(*logits, ids, strict=True)]).summary()
    expected["other_perplexity"] = expected.pop("packed_perplexity")
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=2e-3)


def test_wrong_words_are_one_line(pruned: Path, german: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    keep = ("--keep", "75%", "-o", out)
    wrong = [
        (("prune", MODEL, *keep), "say what the experts are judged by"),
        (("prune", MODEL, "--keep", "5%", "-o", out, "--text", german), "this model needs 8"),
        (("prune", MODEL, "--keep", "9" * 5000, "-o", out, "--text", german), "--keep takes a share of the experts"),
        (("prune", MODEL, *keep, "--by", "luck", "--text", german), "experts are judged by frequency"),
        (("prune", MODEL, *keep, "--profile", "chat"), "use --by frequency, or --text FILE"),
        (
            ("prune", MODEL, *keep, "--by", "frequency", "--profile", "nope"),
            "hotset profile list shows those",
        ),
        (("prune", MODEL, *keep, "--saliency", tmp_path / "none.safetensors"), "--save-saliency FILE keeps one"),
        (("prune", MODEL, *keep, "--saliency", german), "holds no saliency"),
        (("prune", MODEL, *keep, "--text", tmp_path / "none.txt"), "cannot read"),
        (("prune", MODEL, *keep, "--text", german, "--prompts", german), "not both"),
        (("prune", MODEL, "--keep", "75%", "-o", pruned, "--text", german), "exists: choose another name"),
        (("prune", tmp_path / "none", *keep, "--text", german), "there is no folder"),
        (("prune", MODEL, *keep, "--text", german, "--save-saliency", tmp_path / "no" / "file"), "there is no folder"),
        (("prune", pruned, *keep, "--saliency", pruned.with_name("saliency.safetensors")), "this one has 8 x 48"),
        (("compare", MODEL, pruned), "--text FILE"),
        (("compare", MODEL, tmp_path / "none", "--text", german), "there is no folder"),
        (("compare", MODEL, pruned, "--text", tmp_path / "none.txt"), "cannot read"),
    ]
    for words, why in wrong:
        assert why in call(*words).error, words
        assert not out.exists()
    ended = call("prune", MODEL, "-o", out)
    assert ended.code == 2
    assert "--keep" in ended.err
