"""int8 and int4: what they store, their products and lookups, and who is told when a format cannot hold a matrix.

Errors are the length of the difference over the length of what was expected.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_writers import permute_rows
from torch import Tensor, nn

from fuel_core import layers
from fuel_core.checkpoint import open_checkpoint
from fuel_core.checkpoint.base import TensorInfo
from fuel_core.checkpoint.formats import MOST_INT8_ERROR, choose, pack
from fuel_core.checkpoint.gguf_blocks import AFFINE4_TYPES
from fuel_core.errors import BackendUnavailableError, WeightsError
from fuel_core.layers import packed_formats, weight_formats
from fuel_core.layers.packed_formats import DENSE_FROM_ROWS, TensorRows, int4_layout, pieces
from fuel_core.layers.weight_formats import FORMATS, install, relative_error, store

Q = gguf.GGMLQuantizationType
PACKED = ["int8", "int4"]

# Against a float64 product of the unpacked weights. Genuine, over all shapes below: 0.0046 through the kernels (the
# input and the result are rounded to bfloat16), 2.5e-7 through the dense product in float32. Scales of the neighbouring
# row: 0.18 (int8), 0.32 (int4); of the neighbouring group: 0.39.
KERNEL_ERROR, DENSE_ERROR = 0.01, 1e-5
# Of the stored matrix against the original, normal numbers: int8 0.0055 to 0.0068, int4 0.079 to 0.080.
FORMAT_ERROR = {"int8": 0.01, "int4": 0.09}

SHAPES = [(67, 96), (576, 192), (1, 32), (33, 64), (130, 32), (80, 20), (5, 7), (1, 3)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_linear(word: str, n: int, k: int, bias: bool = True) -> layers.Linear:
    module = layers.Linear(k, n, bias=bias)
    if bias:
        module.bias = nn.Parameter(normal(n, seed=7), requires_grad=False)
    store(module, normal(n, k), word)
    return module


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if name != "bias"}


def unpacked(module: layers.Linear | layers.Embedding) -> Tensor:
    """The matrix that a module stands for, float32, in one piece."""
    n, k = packed_formats.shape_of(module)
    chosen = module.weight_format
    return torch.cat([chosen.unpacked(parameters_of(module), (n, k), a, b) for a, b in pieces(n, k)])


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def holds(word: str, n: int, k: int) -> bool:
    return FORMATS[word].cannot_hold(n, k) is None


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("word", PACKED)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_product_is_that_of_the_unpacked_matrix(word: str, n: int, k: int, rows: int) -> None:
    if not holds(word, n, k):
        with pytest.raises(WeightsError, match=f"input width {k} is no multiple of 32"):
            packed_linear(word, n, k)
        return
    module, x = packed_linear(word, n, k), normal(1, rows, k, seed=5)
    expected = x.double() @ unpacked(module).double().T + module.bias.double()
    found = module(x)
    assert (found.shape, found.dtype) == ((1, rows, n), torch.float32)
    dense = rows >= DENSE_FROM_ROWS[word] and packed_formats.dense_product_dtype() == torch.float32
    assert error(found, expected) < (DENSE_ERROR if dense else KERNEL_ERROR)
    assert module(x.bfloat16()).dtype == torch.bfloat16
    assert error(module(x.bfloat16()).float(), expected) < KERNEL_ERROR


@pytest.mark.parametrize("word", PACKED)
def test_the_bounds_see_a_scale_of_another_row_or_group(word: str) -> None:
    module, x = packed_linear(word, 96, 192), normal(1, 1, 192, seed=5)
    expected = x.double() @ unpacked(module).double().T + module.bias.double()
    for axis in range(2 if word == "int4" else 1):
        other = packed_linear(word, 96, 192)
        name = "weight_scale" if word == "int8" else "weight_scale_and_zero"
        scale = getattr(other, name)
        setattr(other, name, nn.Parameter(scale.roll(1, dims=axis), requires_grad=False))
        assert error(other(x), expected) > 5 * KERNEL_ERROR


@pytest.mark.parametrize("word", PACKED)
@pytest.mark.parametrize(("n", "k"), [(576, 192), (67, 96), (130, 32)])
def test_stored_matrix_is_near_what_was_stored(word: str, n: int, k: int) -> None:
    module = packed_linear(word, n, k)
    found = relative_error(module.weight_format, parameters_of(module), TensorRows(normal(n, k)))
    assert found == pytest.approx(error(unpacked(module), normal(n, k)), rel=1e-5)
    assert 1e-4 < found < FORMAT_ERROR[word]


@pytest.mark.parametrize("word", ["f32", "bf16", *PACKED])
@pytest.mark.parametrize(("n", "k"), [(67, 96), (130, 32)])
def test_embedding_rows_are_those_of_the_unpacked_matrix(word: str, n: int, k: int) -> None:
    table = layers.Embedding(n, k)
    store(table, normal(n, k), word)
    ids = torch.arange(n).flip(0).view(1, -1)
    rows = table(ids)
    assert (rows.shape, rows.dtype) == ((1, n, k), torch.float32)
    assert torch.equal(rows[0], unpacked(table).flip(0))


def test_embedding_of_a_width_that_is_no_multiple_of_32_comes_out_unpadded() -> None:
    table = layers.Embedding(9, 20)
    store(table, normal(9, 20), "int8")
    assert table(torch.tensor([[8, 0]])).shape == (1, 2, 20)


def test_packing_in_pieces_equals_packing_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 16, (192, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    whole = torch._convert_weight_to_int4pack_for_cpu(codes, 1).reshape(192, 32)

    class Codes(TensorRows):
        def affine4(self, first: int, last: int) -> packed_formats.Affine4:
            ones = torch.ones(last - first, 2)
            return packed_formats.Affine4(codes[first:last].to(torch.uint8), ones, ones)

    monkeypatch.setattr(packed_formats, "pieces", lambda n, k, multiple=64, elements=0: pieces(n, k, multiple, 1))
    stored = FORMATS["int4"].pack(Codes(codes.float()))
    assert torch.equal(stored["weight"], whole)
    assert torch.equal(stored["weight_scale_and_zero"][..., 1], torch.full((2, 192), 9.0).bfloat16())


def test_an_unknown_layout_leaves_the_product_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = packed_linear("int4", 96, 64), normal(1, 70, 64, seed=5)
    expected = x.double() @ unpacked(module).double().T + module.bias.double()
    assert int4_layout() is not None, "this CPU's layout is a known one"
    assert error(module(x), expected) < DENSE_ERROR
    monkeypatch.setattr(packed_formats, "int4_layout", lambda: None)
    assert DENSE_ERROR < error(module(x), expected) < KERNEL_ERROR
    assert "layout" in str(FORMATS["int4"].cannot_hold(64, 64))


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("halves", [True, False])
def test_layouts_of_other_cpus_are_unpacked_as_well(block: int, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = packed_formats._Layout(block, halves)
    codes = torch.randint(0, 16, (128, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    low, high = layout.nibbles(codes.view(-1, block, 64).transpose(1, 2))
    stored = {
        "weight": (low | high << 4).to(torch.uint8).reshape(128, 32),
        "weight_scale_and_zero": normal(2, 128, 2, seed=1).bfloat16(),
    }
    scale, zero = (t.t().repeat_interleave(32, dim=1) for t in stored["weight_scale_and_zero"].float().unbind(-1))
    expected = (codes - 8) * scale + zero
    monkeypatch.setattr(packed_formats, "int4_layout", lambda: layout)
    assert torch.equal(FORMATS["int4"].unpacked(stored, (128, 64), 0, 128), expected)
    table = layers.Embedding(128, 64)
    install(table, "int4", stored)
    assert torch.equal(table(torch.arange(128).view(1, -1))[0], expected)
    module = layers.Linear(64, 128)
    install(module, "int4", stored)
    x = normal(1, 70, 64, seed=5)
    monkeypatch.setattr(packed_formats, "dense_product_dtype", lambda: torch.float32)
    assert error(module(x), x @ expected.T) < DENSE_ERROR


@pytest.mark.parametrize("word", PACKED)
def test_a_cpu_with_16_bit_products_unpacks_to_16_bits(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_formats, "dense_product_dtype", lambda: torch.bfloat16)
    module, x = packed_linear(word, 67, 96), normal(1, 70, 96, seed=5)
    expected = x.double() @ unpacked(module).double().T + module.bias.double()
    # Inputs, unpacked numbers and results are rounded to bfloat16: genuine 0.0030.
    assert DENSE_ERROR < error(module(x), expected) < KERNEL_ERROR


@pytest.mark.parametrize("word", PACKED)
def test_rows_of_one_number_and_of_zeros_come_back(word: str) -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 0.5
    module = layers.Linear(64, 3)
    store(module, weight, word)
    torch.testing.assert_close(unpacked(module), weight, rtol=0.004, atol=0)


@pytest.mark.parametrize("word", PACKED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(word: str, bad: float) -> None:
    weight = normal(3, 64)
    weight[1, 2] = bad
    with pytest.raises(WeightsError, match="expected finite numbers to quantise"):
        store(layers.Linear(64, 3), weight, word)


@pytest.mark.parametrize("word", PACKED)
def test_another_format_leaves_nothing_of_the_first_behind(word: str) -> None:
    module = packed_linear(word, 64, 64)
    assert (module.packed_format, len(parameters_of(module))) == (word, 2)
    assert all(not p.requires_grad for p in module.parameters())
    store(module, normal(64, 64), "bf16")
    assert (module.packed_format, list(parameters_of(module))) == (None, ["weight"])
    assert module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("word", PACKED)
def test_casting_the_whole_model_does_not_break_a_packed_weight(word: str) -> None:
    module, x = packed_linear(word, 64, 64), normal(1, 1, 64, seed=5)
    expected = module(x)
    assert torch.equal(module.to(torch.float32)(x), expected)


@pytest.mark.parametrize("word", PACKED)
def test_project_gives_each_product_its_own_answer(word: str) -> None:
    x = normal(1, 1, 64)
    modules = [packed_linear(word, n, 64) for n in (96, 32, 32)]
    for module, y in zip(modules, layers.project(x, *modules), strict=True):
        assert torch.equal(y, module(x))


# -- GGUF blocks ------------------------------------------------------------------------------------------------------


def write_matrix(path: Path, kind: Q, n: int, k: int, name: str = "output.weight", permute: int = 0) -> Path:
    """A GGUF file of one matrix in any block type, of random numbers or (Q4_K and others) of random blocks."""
    weight = normal(n, k, seed=3)
    weight = permute_rows(weight, permute) if permute else weight
    try:
        blocks = gguf.quants.quantize(weight.numpy(), kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(0).integers(0, 256, (n, k // block, size), dtype=np.uint8)
        for at in (0, 2, size - 2):  # half-precision scales, wherever they stand: finite, and of one size
            blocks[:, :, at + 1] = 0x2C
        blocks = blocks.reshape(n, -1)
    writer = gguf.GGUFWriter(path, "llama")
    if permute:
        writer.add_uint32("llama.attention.head_count", permute)
        writer.add_uint32("llama.attention.head_count_kv", permute)
    writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Of int4 against the file's own numbers: only scale and zero are rounded. Genuine 0.0017 to 0.0020. Requantising the
# values between least and largest, instead of keeping the codes: 0.0043 (Q4_1), 0.016 (Q4_K), 0.064 (Q4_0).
REPACKED_ERROR = 0.003


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q4_K], ids=lambda q: q.name)
def test_four_bit_blocks_keep_their_codes(tmp_path: Path, kind: Q) -> None:
    assert kind.name in AFFINE4_TYPES
    ck = open_checkpoint(write_matrix(tmp_path / "m.gguf", kind, 70, 512))
    expected = ck.tensor("lm_head.weight")
    rows = ck.rows("lm_head.weight")
    assert torch.equal(rows.rows(3, 40), expected[3:40])
    codes = rows.affine4(3, 40)
    assert codes is not None
    assert int(codes.codes.max()) == 15
    exact = codes.codes.view(37, -1, 32) * codes.scale.unsqueeze(2) + codes.minimum.unsqueeze(2)
    torch.testing.assert_close(exact.view(37, 512), expected[3:40], rtol=1e-6, atol=1e-6)
    stored = FORMATS["int4"].pack(rows)
    assert error(FORMATS["int4"].unpacked(stored, (70, 512), 0, 70), expected) < REPACKED_ERROR


@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q8_0], ids=lambda q: q.name)
def test_rows_that_the_converter_moved_are_put_back_without_dequantising(tmp_path: Path, kind: Q) -> None:
    ck = open_checkpoint(write_matrix(tmp_path / "m.gguf", kind, 64, 64, "blk.0.attn_k.weight", permute=2))
    name = "model.layers.0.self_attn.k_proj.weight"
    expected = ck.tensor(name)
    assert not torch.equal(expected, permute_rows(expected, 2)), "the two orders differ"
    assert error(expected, normal(64, 64, seed=3)) < 0.1
    source = ck.rows(name)
    assert torch.equal(torch.cat([source.rows(0, 5), source.rows(5, 64)]), expected)
    stored = FORMATS["int4"].pack(source)
    assert error(FORMATS["int4"].unpacked(stored, (64, 64), 0, 64), expected) < FORMAT_ERROR["int4"]


@pytest.mark.parametrize(
    ("stored", "word", "format_", "measured"),
    [
        ("Q4_0", "auto", "int4", False),
        ("Q4_1", "auto", "int4", False),
        ("Q4_K", "auto", "int4", False),
        ("Q5_K", "auto", "int8", True),
        ("Q6_K", "auto", "int8", True),
        ("Q8_0", "auto", "int8", True),
        ("bfloat16", "auto", "bf16", False),
        ("float32", "auto", "f32", False),
        ("Q8_0", "int4", "int4", False),
        ("bfloat16", "int8", "int8", False),
        ("Q4_1", "bf16", "bf16", False),
    ],
)
def test_each_stored_type_has_its_format(stored: str, word: str, format_: str, measured: bool) -> None:
    choice = choose(word, TensorInfo((64, 256), stored))
    assert (choice.format, choice.measured, choice.asked) == (format_, measured, None)


def test_a_width_that_int4_cannot_hold_goes_to_int8_and_says_so() -> None:
    choice = choose("int4", TensorInfo((64, 40), "float32"))
    assert (choice.format, choice.asked) == ("int8", "int4")
    assert "40 is no multiple of 32" in choice.reason


def test_int8_gives_way_to_bfloat16_where_it_loses_too_much() -> None:
    mild, harsh = normal(64, 256), normal(64, 256)
    mild[:, 0], harsh[:, 0] = 8.0, 60.0  # one large number a row costs all others their resolution
    choice = choose("auto", TensorInfo((64, 256), "Q8_0"))
    kept, given_up = pack(choice, TensorRows(mild)), pack(choice, TensorRows(harsh))
    assert kept.format.name == "int8"
    assert kept.error is not None
    assert 0.01 < kept.error < MOST_INT8_ERROR
    assert given_up.format.name == "bf16"
    assert given_up.error is not None
    assert given_up.error > MOST_INT8_ERROR
    assert torch.equal(given_up.tensors["weight"], harsh.bfloat16())


def test_packed_weights_are_refused_off_the_cpu() -> None:
    module = packed_linear("int8", 64, 64)

    class Elsewhere(Tensor):
        is_cuda = True  # type: ignore[assignment]

    module._parameters["weight"] = module.weight.as_subclass(Elsewhere)  # type: ignore[assignment]
    with pytest.raises(BackendUnavailableError, match="packed weights: a CPU expected"):
        module(normal(1, 1, 64))


def test_install_takes_a_parameter_as_it_is() -> None:
    module, other = packed_linear("int8", 64, 64, bias=False), layers.Embedding(64, 64)
    install(other, "int8", parameters_of(module))
    assert other.weight is module.weight
    assert other.weight_scale is module.weight_scale


def test_packed_weights_are_copied_and_pickled_for_the_same_cpu_alone() -> None:
    module, x = packed_linear("int4", 64, 64), normal(1, 1, 64, seed=5)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))
    module.packed_layout = "_Layout(block=48, halves=False)"
    with pytest.raises(WeightsError, match="pickled int4 weights: expected the layout of this CPU"):
        pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
def test_many_rows_over_16_bit_weights_are_multiplied_in_float32_where_the_cpu_has_nothing_better(
    dtype: torch.dtype, activations: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_formats, "dense_product_dtype", lambda: torch.float32)
    module = layers.Linear(96, 67, bias=True).to(dtype)
    module.weight.data, module.bias.data = normal(67, 96).to(dtype), normal(67, seed=7).to(dtype)
    x = normal(1, weight_formats.WIDENED_FROM_ROWS, 96, seed=5, dtype=activations)
    expected = x.double() @ module.weight.double().T + module.bias.double()
    found = module(x)
    assert found.dtype == activations
    # Genuine: 1.9e-7, and 0.0016 where the result is rounded to bfloat16. Multiplied in the weights' dtype: 0.0022
    # (bf16) and 0.00029 (f16) with float32 activations; with bfloat16 ones the two cannot be told apart.
    assert error(found, expected) < (1e-5 if activations == torch.float32 else 0.003)
