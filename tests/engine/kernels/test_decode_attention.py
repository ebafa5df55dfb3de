"""Attention of one new token: as a plain float64 computation has it, and as stock models have it."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined

from hotset.engine.kernels import attention  # noqa: E402
from hotset.models.patches import decode_attention_used  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not attention.INTERPRETED, reason="needs a GPU or Triton's interpreter"),
    pytest.mark.filterwarnings("ignore"),
]


def tensors(batch: int, heads: int, kv_heads: int, length: int, dims: tuple[int, int], dtype: Any) -> Any:
    """A query of one token, and keys and values."""
    generator = torch.Generator().manual_seed(heads * length + dims[0])
    shapes = (batch, heads, 1, dims[0]), (batch, kv_heads, length, dims[0]), (batch, kv_heads, length, dims[1])
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def expected(q: Any, k: Any, v: Any, mask: Any, scale: float, cap: float | None = None, sinks: Any = None) -> Any:
    """The same in float64, from what the mask shows; hidden rows of keys and values are taken as zero."""
    q, k, v = q.double(), k.double(), v.double()
    (batch, heads), (kv_heads, length) = q.shape[:2], k.shape[1:3]
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    shown = torch.ones(1, 1, 1, length, dtype=torch.bool, device=q.device)
    bias = torch.zeros_like(shown, dtype=torch.float64)
    if mask is not None:
        shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        bias = bias if mask.dtype == torch.bool else mask.double()
    shown = shown.expand(batch, heads, 1, length)
    k, v = (torch.where(shown.transpose(2, 3), t, 0.0) for t in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = torch.where(shown, scores + bias, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(batch, -1, -1, -1)], dim=-1)
    return (scores.softmax(-1).nan_to_num(0.0)[..., :length] @ v).transpose(1, 2)


def agree(q: Any, k: Any, v: Any, mask: Any = None, cap: float | None = None, sinks: Any = None) -> None:
    """Our attention is the expected one, in the layout that transformers wants."""
    found, weights = attention.decode_attention(
        None, q, k, v, mask, scaling=0.3, softcap=cap, s_aux=sinks, stock=refuse, sliding_window=7
    )
    assert weights is None
    assert found.is_contiguous()
    assert found.shape == (q.shape[0], 1, q.shape[1], v.shape[3])
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(found.double(), expected(q, k, v, mask, 0.3, cap, sinks), rtol=tolerance, atol=tolerance)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("fell back")


def causal(batch: int, length: int, seen: int, *, left: int = 0, window: int | None = None) -> Any:
    """Flags of the keys seen so far: without padding on the left of the last row, and within a window."""
    at = torch.arange(length, device=DEVICE)
    flags = (at < seen).repeat(batch, 1)
    flags[-1] &= at >= left
    if window:
        flags &= at >= seen - window
    return flags[:, None, None, :]


def spoilt(tensor: Any, flags: Any) -> Any:
    """NaN and infinities wherever no row may look."""
    hidden = ~flags[:, 0, 0, :, None].expand(-1, -1, tensor.shape[-1])
    filler = torch.full_like(tensor, torch.nan)
    filler[..., ::2] = torch.inf
    return torch.where(hidden[:, None], filler, tensor)


@pytest.fixture(autouse=True)
def _wide_dots(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend Triton 3.6: it takes bfloat16 in dots as integers."""
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    builder = triton_interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b))
        return dot(self, a, b, *rest)

    monkeypatch.setattr(builder, "create_dot", widened)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 17, 119, 300, 1024])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (8, 1), (7, 1)])
def test_groups_and_lengths(heads: int, kv_heads: int, length: int, dtype: Any) -> None:
    agree(*tensors(1, heads, kv_heads, length, (32, 32), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (128, 128), (192, 128), (80, 48), (256, 256)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1)])
def test_head_dims(dims: tuple[int, int], heads: int, kv_heads: int, dtype: Any) -> None:
    q, k, v = tensors(1, heads, kv_heads, 119, dims, dtype)
    agree(q / dims[0] ** 0.25, k / dims[0] ** 0.25, v, causal(1, 119, 77))


def test_the_widest_heads() -> None:
    q, k, v = tensors(1, 4, 1, 119, (512, 512), torch.bfloat16)
    agree(q / 5, k / 5, v, causal(1, 119, 77))


@pytest.mark.parametrize("length", [17, 300, 1024])
@pytest.mark.parametrize(("added", "heads"), [(False, 4), (True, 1)])
def test_what_is_hidden_may_hold_anything(added: bool, heads: int, length: int) -> None:
    for shape in ({}, {"left": 3}, {"window": 5}):
        q, k, v = tensors(3, heads, 1, length, (32, 32), torch.float32)
        flags = causal(3, length, length * 2 // 3, **shape)
        mask = torch.zeros(flags.shape, device=DEVICE).masked_fill(~flags, torch.finfo(torch.float32).min)
        agree(q, spoilt(k, flags), spoilt(v, flags), mask if added else flags)


def test_a_row_without_keys_gives_zeros() -> None:
    for length in (17, 1024):
        q, k, v = tensors(2, 8, 1, length, (32, 32), torch.float32)
        flags = causal(2, length, 9, left=length)
        assert not flags[-1].any()
        found = attention.attend(q, spoilt(k, flags), spoilt(v, flags), flags, 0.3)
        assert not found[-1].any()
        agree(q, spoilt(k, flags), spoilt(v, flags), flags, sinks=torch.randn(8, device=DEVICE))


@pytest.mark.parametrize("length", [17, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 8])
def test_sinks_and_softcap(heads: int, dtype: Any, length: int) -> None:
    q, k, v = tensors(2, heads, 2, length, (32, 32), dtype)
    sinks = torch.linspace(-3, 9, heads, device=DEVICE).to(dtype)
    flags = causal(2, length, length - 5, left=4)
    agree(q, k, v, flags, sinks=sinks)
    agree(q, k, v, flags, cap=2.5)
    agree(q, k, v, None, cap=50.0, sinks=sinks)


def test_added_masks_may_hold_any_number() -> None:
    q, k, v = tensors(2, 8, 2, 300, (32, 32), torch.float32)
    bias = torch.randn(2, 1, 1, 300, device=DEVICE)
    bias[..., 100:200] = -torch.inf
    agree(q, k, v, bias)


def test_a_mask_for_each_head() -> None:
    q, k, v = tensors(2, 6, 2, 300, (32, 32), torch.float32)
    flags = torch.rand(1, 6, 1, 300, device=DEVICE) < 0.3
    flags[:, 1] = False
    flags[:, :, :, 64:192] = False
    agree(q, k, v, flags)
    agree(q, k, v, torch.zeros(flags.shape, device=DEVICE).masked_fill(~flags, -torch.inf))


def test_many_query_heads_share_one_key_head() -> None:
    agree(*tensors(1, 80, 1, 40, (32, 32), torch.float32))


def test_memory_may_be_strided() -> None:
    q, k, v = tensors(3, 8, 2, 300, (32, 48), torch.float32)
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))  # [batch, length, heads, dim]
    both = torch.cat([k, v], dim=-1)  # as deepseek has them, side by side
    mask = causal(3, 600, 400)[..., ::2]
    agree(q.transpose(1, 2).contiguous().transpose(1, 2), both[..., :32], both[..., 32:], mask)
    agree(q.expand(3, -1, -1, -1), k[:1].expand(3, -1, -1, -1), v.transpose(2, 3).contiguous().transpose(2, 3), mask)


def test_visible_nan_is_not_hidden() -> None:
    for length in (17, 300):
        q, k, v = tensors(1, 8, 2, length, (32, 32), torch.float32)
        k[:, :, 5] = torch.nan
        assert attention.attend(q, k, v, None, 0.3).isnan().all()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 2},
        {"dropout": 0.1},
        {"mask": torch.ones(1, 1, 1, 16, dtype=torch.bool)},
        {"mask": torch.ones(2, 17, dtype=torch.bool)},
        {"mask": torch.ones(2, 1, 1, 17, dtype=torch.int64)},
        {"dim": 512},
        {"dtype": torch.float64},
        {"position_bias": torch.zeros(1, 8, 1, 17)},
        {"output_attentions": True},
        {"grad": True},
    ],
)
def test_all_else_falls_back(change: dict[str, Any]) -> None:
    dim, dtype = change.pop("dim", 32), change.pop("dtype", torch.float32)
    q, k, v = tensors(2, 8, 2, 17, (dim, dim), dtype)
    q = q.expand(-1, -1, change.pop("tokens", 1), -1).requires_grad_(change.pop("grad", False))
    seen = []

    def stock(*given: Any, **named: Any) -> tuple[str, None]:
        seen.append((given, named))
        return "stock", None

    result = attention.decode_attention(
        None, q, k, v, change.pop("mask", None), scaling=0.3, s_aux=3, stock=stock, **change
    )
    assert result == ("stock", None)
    assert seen[0][0][1] is q
    assert seen[0][1] == {"dropout": 0.0, "scaling": 0.3, "s_aux": 3} | change


def test_plans_fill_the_device_and_scan_little() -> None:
    short = attention.plan(1, 4, 8, 119, 256, 264)
    assert short.splits == 1
    long = attention.plan(1, 4, 8, 4096, 256, 264)
    assert long.splits == 32
    huge = attention.plan(1, 4, 8, 1 << 17, 256, 264)
    assert 4 * huge.splits >= 256
    assert huge.scan * huge.block_n <= 2 * attention.SCANNED_KEYS
    assert attention.plan(64, 8, 4, 1024, 256, 264).splits == 1


FAMILIES = ["qwen3_moe", "gpt_oss", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the keys that our kernel was called with."""
    seen: list[tuple[int, ...]] = []
    ours = attention.attend

    def counted(query: Any, key: Any, *rest: Any) -> Any:
        seen.append(tuple(key.shape))
        return ours(query, key, *rest)

    monkeypatch.setattr(attention, "attend", counted)
    return seen


def model_of(family: str, **changes: Any) -> Any:
    from tiny_models import make

    return make(family, **changes).to(DEVICE)


def prefilled(model: Any, ids: Any, mask: Any, length: int = 40) -> Any:
    """A static cache that holds all tokens but the last."""
    from tiny_models import quiet
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length)
    with quiet(), torch.no_grad():
        model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
    return cache


def step(model: Any, ids: Any, mask: Any, cache: Any) -> Any:
    """The logits of the last token."""
    from tiny_models import quiet

    positions = mask.sum(1, keepdim=True) - 1
    with quiet(), torch.no_grad():
        return model(
            input_ids=ids[:, -1:], attention_mask=mask, past_key_values=copy.deepcopy(cache), position_ids=positions
        ).logits


def prompt() -> tuple[Any, Any]:
    """Two rows of tokens, one padded on the left."""
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids, mask


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_decode_as_stock_does(family: str, implementation: str, calls: list[Any]) -> None:
    if family == "gpt_oss" and implementation == "sdpa":
        pytest.skip("gpt_oss has no sdpa")
    model = model_of(family)
    model.set_attn_implementation(implementation)
    ids, mask = prompt()
    cache = prefilled(model, ids, mask)
    before = step(model, ids, mask, cache)
    assert not calls
    with decode_attention_used(model):
        ours = step(model, ids, mask, cache)
    assert len(calls) == model.config.num_hidden_layers
    assert {shape[2] for shape in calls} == {40}
    torch.testing.assert_close(ours, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(step(model, ids, mask, cache), before)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_rolling_caches(family: str, calls: list[Any]) -> None:
    model = model_of(family, sliding_window=8)
    ids, mask = prompt()
    cache = prefilled(model, ids, mask)
    before = step(model, ids, mask, cache)
    with decode_attention_used(model):
        ours = step(model, ids, mask, cache)
    assert 8 in {shape[2] for shape in calls}
    torch.testing.assert_close(ours, before, rtol=1e-4, atol=1e-4)


def test_families_that_ask_for_the_name_of_the_implementation(calls: list[Any]) -> None:
    model = model_of("deepseek_v32", index_topk=4)  # it puts its choice of four keys into the mask of sdpa and eager
    ids, mask = prompt()
    cache = prefilled(model, ids, mask)
    before = step(model, ids, mask, cache)
    with decode_attention_used(model):
        ours = step(model, ids, mask, cache)
    assert calls
    torch.testing.assert_close(ours, before, rtol=1e-4, atol=1e-4)


def test_prefill_and_other_models_stay_stock(calls: list[Any]) -> None:
    mine, other = model_of("qwen3_moe"), model_of("mixtral")
    ids, mask = prompt()
    with decode_attention_used(mine):
        cache, theirs = prefilled(mine, ids, mask), prefilled(other, ids, mask)
        step(other, ids, mask, theirs)
        assert not calls
        with decode_attention_used(other):
            step(other, ids, mask, theirs)
            assert len(calls) == other.config.num_hidden_layers
        calls.clear()
        step(other, ids, mask, theirs)
        assert not calls
        step(mine, ids, mask, cache)
        assert len(calls) == mine.config.num_hidden_layers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
