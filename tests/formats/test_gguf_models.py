"""GGUF files of tiny models: served in their blocks, and equal to transformers where that is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "families")]

import exactness  # noqa: E402
import gguf_models  # noqa: E402

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.formats import parse  # noqa: E402
from hotset.formats.gguf import KEPT  # noqa: E402
from hotset.models.fingerprint import fingerprint_of_folder  # noqa: E402
from hotset.models.gguf_checkpoint import GgufCheckpoint  # noqa: E402
from hotset.models.packing import pack  # noqa: E402

TOKENS = 512
PROMPT = torch.tensor([[5, 90, 31, 7, 41, 77]])


def logits(model: Any, prompt: Any = PROMPT) -> Any:
    exactness.aligned(model)  # bits of plain products depend on where their weights lie
    with torch.no_grad():
        return torch.cat([model(prompt).logits, model(prompt[:, :1]).logits], dim=1)


def run(place: Path | str, memory: str = "50%", **options: Any) -> Any:
    model = hotset.load(place, memory=memory, device="cpu", **{"dtype": "float32"} | options)
    try:
        return logits(model)
    finally:
        model.hotset.close()


def stock(file: Path) -> Any:
    """What transformers makes of a file, with a config that states the experts' width."""
    from transformers import AutoModelForCausalLM

    found = GgufCheckpoint.open(str(file))
    assert found is not None
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=found.config, dtype=torch.float32
    )
    return logits(model.eval())


def tiny(folder: Path, name: str, **more: Any) -> Path:
    """A tiny checkpoint of a family, with blocks of 256 inputs everywhere."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    settings = {
        "vocab_size": TOKENS, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_experts_per_tok": 2,
        "initializer_range": 0.1, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0,
        "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(name, **settings | more)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name, text in tokenizer_of(TOKENS).items():
        (folder / name).write_text(text)
    return folder


def tokenizer_of(tokens: int) -> dict[str, str]:
    """The first tokens of the reference model's tokenizer: each merge makes one, and transformers reads them slowly."""
    files = {file.name: file.read_text() for file in Path(reference.path()).glob("tokenizer*.json")}
    whole = json.loads(files["tokenizer.json"])
    model = whole["model"]
    without = len(model["vocab"]) - len(model["merges"])
    model["vocab"] = {word: number for word, number in model["vocab"].items() if number < tokens}
    model["merges"] = model["merges"][: tokens - without]
    return files | {"tokenizer.json": json.dumps(whole)}


def kinds_of(model: Any) -> list[list[str]]:
    """The types of the matrices of an expert, layer by layer."""
    layers = model.hotset.engine.offloaded("test").catalog.layers
    return [[parse(matrix.format).kind for matrix in layer.layout.matrices] for layer in layers]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {"num_experts": 5, "moe_intermediate_size": 256, "norm_topk_prob": True}
    return tiny(tmp_path_factory.mktemp("plain") / "model", "qwen3_moe", **more)


@pytest.mark.parametrize("kind", KEPT)
def test_experts_stay_in_their_blocks(kind: str, plain: Path, tmp_path: Path) -> None:
    file = gguf_models.from_folder(plain, tmp_path / "a.gguf", gguf_models.matrices_as(kind))
    model = hotset.load(file, memory="50%", device="cpu", dtype="float32")
    assert kinds_of(model) == [[kind, kind]] * 2
    found = logits(model)
    assert not model.hotset.notes
    model.hotset.close()
    torch.testing.assert_close(found, run(file, experts="dense"), rtol=1e-4, atol=1e-4)
    assert torch.equal(found, run(file, "90%"))
    if kind != "MXFP4":  # of no use for codes that transformers' decoder rounds otherwise
        torch.testing.assert_close(found, stock(file), rtol=1e-4, atol=1e-4)


def test_matrices_of_one_layer_in_several_types(plain: Path, tmp_path: Path) -> None:
    """As in Q4_K_M: the last matrix in more bits, in some layers."""

    def choose(name: str) -> str:
        if "_exps" in name:
            return "Q6_K" if "down" in name and "blk.0" in name else "Q4_K"
        return "F32" if "norm" in name or "gate_inp" in name else "F16"

    file = gguf_models.from_folder(plain, tmp_path / "a.gguf", choose)
    model = hotset.load(file, memory="50%", device="cpu", dtype="float32")
    assert [sorted(each) for each in kinds_of(model)] == [["Q4_K", "Q6_K"], ["Q4_K", "Q4_K"]]
    found = logits(model)
    model.hotset.close()
    torch.testing.assert_close(found, stock(file), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kinds", [("Q2_K", "Q2_K"), ("Q3_K", "Q4_K"), ("F16", "F16"), ("F32", "Q8_0")])
def test_other_types_are_expanded(kinds: tuple[str, str], plain: Path, tmp_path: Path) -> None:
    choose = gguf_models.matrices_as(kinds[0], down=kinds[1])
    file = gguf_models.from_folder(plain, tmp_path / "a.gguf", choose)
    torch.testing.assert_close(run(file), stock(file), rtol=1e-4, atol=1e-4)


def test_a_line_says_that_blocks_are_expanded(plain: Path, tmp_path: Path) -> None:
    """A type that is not kept, and gates and ups of different types, which are one matrix in a slot."""
    for name, choose, words in (
        ("a", gguf_models.matrices_as("Q2_K", down="Q4_K"), "as GGUF Q2_K are expanded"),
        ("b", lambda name: "Q4_K" if "gate_exps" in name else "Q5_K" if "_exps" in name else "F32", "Q4_K and GGUF Q5"),
    ):
        file = gguf_models.from_folder(plain, tmp_path / f"{name}.gguf", choose)
        model = hotset.load(file, memory="50%", device="cpu", dtype="float32")
        assert any(words in note for note in model.hotset.notes)
        assert [len(each) for each in kinds_of(model)] == [1, 1]
        found = logits(model)
        model.hotset.close()
        torch.testing.assert_close(found, stock(file), rtol=1e-4, atol=1e-4)


def test_shards_are_one_model(plain: Path, tmp_path: Path) -> None:
    choose = gguf_models.matrices_as("Q4_0")
    one = gguf_models.from_folder(plain, tmp_path / "one.gguf", choose)
    first = gguf_models.from_folder(plain, tmp_path / "several.gguf", choose, shards=3)
    assert first.name == "several-00001-of-00003.gguf"
    assert torch.equal(run(one), run(first))


def test_qwen2_with_a_shared_expert(tmp_path: Path) -> None:
    more = {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    folder = tiny(tmp_path / "model", "qwen2_moe", **more)
    file = gguf_models.from_folder(
        folder, tmp_path / "a.gguf", gguf_models.matrices_as("Q8_0"), architecture="qwen2moe"
    )
    torch.testing.assert_close(run(file), stock(file), rtol=1e-4, atol=1e-4)


def test_minimax(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", "minimax_m2", num_local_experts=4, intermediate_size=128, rotary_dim=32)
    choose = gguf_models.matrices_as("Q4_0")
    file = gguf_models.from_folder(folder, tmp_path / "a.gguf", choose, architecture="minimax-m2", expert_gating_func=2)
    torch.testing.assert_close(run(file), stock(file), rtol=1e-4, atol=1e-4)


def test_the_type_to_compute_in(plain: Path, tmp_path: Path) -> None:
    for kind, others, wanted in (
        ("Q8_0", "Q8_0", torch.bfloat16), ("F16", "F16", torch.float16), ("F32", "F32", torch.float32),
    ):  # fmt: skip
        file = gguf_models.from_folder(plain, tmp_path / f"{kind}.gguf", gguf_models.matrices_as(kind, others))
        found = GgufCheckpoint.open(str(file))
        assert found is not None
        assert found.config.dtype == wanted
        assert found.config.moe_intermediate_size == 256


def test_a_pack_keeps_the_blocks(plain: Path, tmp_path: Path) -> None:
    choose = gguf_models.matrices_as("Q4_K", down="Q6_K")
    file = gguf_models.from_folder(plain, tmp_path / "a.gguf", choose)
    report = pack(file, tmp_path / "packed", dtype="float32")
    assert "tokenizer.json" in report.files
    model = hotset.load(tmp_path / "packed", memory="50%", device="cpu")
    assert model.dtype == torch.float32
    assert [sorted(each) for each in kinds_of(model)] == [["Q4_K", "Q6_K"]] * 2
    assert fingerprint_of_folder(file) == fingerprint_of_folder(tmp_path / "packed")
    found = logits(model)
    model.hotset.close()
    assert torch.equal(found, run(file))
    assert pack(file, tmp_path / "packed", dtype="float32").complete_already


def test_plain_experts_are_made_small(plain: Path, tmp_path: Path) -> None:
    file = gguf_models.from_folder(plain, tmp_path / "a.gguf", gguf_models.matrices_as("F16", "F16"))
    pack(f"{tmp_path}:a.gguf", tmp_path / "packed", experts="int8")
    torch.testing.assert_close(run(tmp_path / "packed", dtype="auto"), run(file, dtype="auto"), rtol=0.1, atol=0.1)


GPT_OSS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight", "mlp.router": "ffn_gate_inp",
}  # fmt: skip


def gpt_oss_tensors(model: Any) -> dict[str, Any]:
    """As llama.cpp's converter has them: gates and ups apart, and matrices by rows of outputs."""
    found = {}
    for name, tensor in model.state_dict().items():
        for theirs, ours in GPT_OSS.items():
            name = name.replace(theirs, ours)
        block = name.partition(".mlp")[0]
        if name.endswith("gate_up_proj"):
            found[f"{block}.ffn_gate_exps.weight"] = tensor[..., 0::2].transpose(1, 2).contiguous()
            found[f"{block}.ffn_up_exps.weight"] = tensor[..., 1::2].transpose(1, 2).contiguous()
        elif name.endswith("gate_up_proj_bias"):
            found[f"{block}.ffn_gate_exps.bias"] = tensor[..., 0::2].contiguous()
            found[f"{block}.ffn_up_exps.bias"] = tensor[..., 1::2].contiguous()
        elif name.endswith("down_proj"):
            found[f"{block}.ffn_down_exps.weight"] = tensor.transpose(1, 2).contiguous()
        else:
            found[name.replace(f"{block}.mlp.experts.down_proj_bias", f"{block}.ffn_down_exps.bias")] = tensor
    return found


@pytest.mark.parametrize("kind", ["F32", "MXFP4", "Q8_0"])
def test_gpt_oss(kind: str, tmp_path: Path) -> None:
    """Its experts, which transformers leaves random, and its rotations, sinks and windows."""
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=8192, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        max_position_embeddings=512, initializer_range=0.1, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "bias")):
            torch.nn.init.normal_(parameter, std=0.5)
    tensors = gpt_oss_tensors(model)
    keys = {
        "block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.sliding_window": 4, "expert_count": 4,
        "expert_used_count": 2, "expert_feed_forward_length": 96, "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
    }  # fmt: skip
    keys = {f"gpt-oss.{key}": value for key, value in keys.items()}

    def choose(name: str) -> str:
        return kind if name.endswith("exps.weight") else "F32"

    tokenizer = Path(reference.path())
    file = gguf_models.write(
        tmp_path / "a.gguf", tensors, keys, choose, architecture="gpt-oss", tokenizer=tokenizer
    )  # fmt: skip
    found = run(file)
    if kind == "F32":
        torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)
        return
    torch.testing.assert_close(found, run(file, experts="dense"), rtol=1e-4, atol=1e-4)
    for number, (name, tensor) in enumerate(tensors.items()):
        if choose(name) != "F32":
            blocks = gguf_models.quantised(tensor, kind, number)
            tensors[name] = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    plain = gguf_models.write(
        tmp_path / "b.gguf", tensors, keys, lambda _: "F32", architecture="gpt-oss", tokenizer=tokenizer
    )  # fmt: skip
    torch.testing.assert_close(found, run(plain), rtol=1e-4, atol=1e-4)


QWEN35 = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias", "mlp.gate.": "ffn_gate_inp.",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip


def test_qwen35_by_the_rules_of_transformers(tmp_path: Path) -> None:
    """Its newer loader: some numbers are stored otherwise than they are used."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hotset.models.gguf_names import architectures

    if "qwen35moe" not in architectures():
        pytest.skip("the installed transformers does not map it")
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "qwen3_5_moe_text", vocab_size=8192, hidden_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, initializer_range=0.1,
    )  # fmt: skip
    tensors = {}
    for name, tensor in AutoModelForCausalLM.from_config(config).float().state_dict().items():
        for theirs, ours in QWEN35.items():
            name = name.replace(theirs, ours)
        if name.endswith("ssm_a"):
            tensor = -tensor.exp()
        if name.endswith("norm.weight") and "ssm" not in name:
            tensor = tensor + 1
        if name.endswith("experts.gate_up_proj"):
            block = name.partition(".mlp")[0]
            tensors[f"{block}.ffn_gate_exps.weight"], tensors[f"{block}.ffn_up_exps.weight"] = tensor.chunk(2, dim=1)
        else:
            tensors[name] = tensor.squeeze() if "conv1d" in name or "inp_shexp" in name else tensor
    keys = {
        "block_count": 4, "context_length": 512, "embedding_length": 64, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.key_length": 32, "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2,
        "ssm.time_step_rank": 4, "ssm.inner_size": 64, "rope.freq_base": 1e7, "rope.dimension_sections": [2, 1, 1, 0],
        "rope.dimension_count": 8, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 32,
    }  # fmt: skip
    keys = {f"qwen35moe.{key}": value for key, value in keys.items()}
    file = gguf_models.write(
        tmp_path / "a.gguf", tensors, keys, lambda name: "Q8_0" if name.endswith("exps.weight") else "F32",
        architecture="qwen35moe", tokenizer=Path(reference.path()),
    )  # fmt: skip
    found = run(file)
    assert found.abs().max() > 0.1
    torch.testing.assert_close(found, stock(file), rtol=1e-4, atol=1e-4)
