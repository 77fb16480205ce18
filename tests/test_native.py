"""The kernels beside float64, what they refuse, and how they are built, kept and trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuel_core import native
from fuel_core.native import build, ops

Matrix = native.Matrix


def dense_mv(x: Tensor, weight: Tensor) -> Tensor | None:
    return only(native.product(x, Matrix(weight, weight)))


def int8_mv(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor | None:
    return only(native.product(x, Matrix(weight, scale)))


int4_mv = int8_mv


def only(found: tuple[Tensor, ...] | None) -> Tensor | None:
    return None if found is None else found[0]


ROOT = Path(__file__).resolve().parent.parent
active = pytest.mark.skipif("not __import__('fuel_core.native', fromlist=['x']).is_active()", reason="no kernels here")

# Largest difference over the largest expected value. Genuine, and the mildest of what a slip in the kernel makes of it
# (a row or a nibble in the wrong place, a group's scale for its neighbour's): above 1e-1.
DENSE, PACKED, ATTENTION = 1e-6, 2e-4, 4e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def difference(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    return float((found.double() - expected).abs().max() / expected.abs().max())


def packed(codes: Tensor, half: int) -> Tensor:
    """[N, K] nibbles in blocks of 2 * half rows, as a machine with that layout packs them."""
    blocks = codes.view(-1, 2, half, codes.shape[1]).transpose(2, 3)
    return (blocks[:, 0] | blocks[:, 1] << 4).to(torch.uint8).reshape(codes.shape[0], -1)


@active
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (3, 96), (70, 64), (576, 576), (960, 1536), (4099, 80)])
def test_dense_products_equal_float64(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = normal(1, 1, k), normal(n, k).to(dtype)
    assert difference(dense_mv(x, weight), x.double() @ weight.double().T) < DENSE


@active
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (3, 96), (70, 64), (4099, 160)])
def test_int8_products_equal_float64(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = normal(1, 1, k), (normal(n, k) * 40).round().clamp(-127, 127).to(torch.int8)
    scale = (normal(n).abs() + 0.1).to(dtype)
    expected = x.double() @ (weight.double() * scale.double()[:, None]).T
    assert difference(int8_mv(x, weight, scale), expected) < PACKED


@active
@pytest.mark.parametrize("half", [16, 32])
@pytest.mark.parametrize(("n", "k"), [(64, 32), (128, 96), (576, 576), (4096, 64)])
def test_int4_products_equal_float64_in_both_layouts(n: int, k: int, half: int) -> None:
    x, codes = normal(1, 1, k), (normal(n, k) * 4 + 8).round().clamp(0, 15).to(torch.int32)
    scales = normal(k // 32, n, 2).to(torch.bfloat16)
    each = scales.double().repeat_interleave(32, 0).permute(2, 1, 0)
    expected = x.double() @ ((codes - 8) * each[0] + each[1]).T
    assert difference(torch.ops.fuel.product(x, packed(codes, half), scales, half), expected) < PACKED


@active
def test_int4_reads_what_torch_packs() -> None:
    codes = torch.randint(0, 16, (128, 96), dtype=torch.int32)
    weight, scales = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), normal(3, 128, 2).to(torch.bfloat16)
    x = normal(1, 1, 96)
    theirs = torch.ops.aten._weight_int4pack_mm_for_cpu(x[0].to(torch.bfloat16), weight, 32, scales)
    ours = int4_mv(x, weight, scales)
    assert ours is not None
    # bfloat16 on their side: 2e-3 to 5e-3 of the largest.
    assert (ours[0] - theirs).abs().max() < 1e-2 * theirs.abs().max()


@active
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 2, 63, 64, 65, 300, 2000])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 24), (8, 1, 16)])
def test_attention_of_one_query_equals_float64(
    heads: int, kv_heads: int, dim: int, keys: int, dtype: torch.dtype, softcap: float | None
) -> None:
    buffer = normal(2, 1, kv_heads, keys + 5, dim).to(dtype)
    k, v = (buffer[i].narrow(2, 3, keys) for i in (0, 1))
    q = normal(1, heads, 1, dim) * 2
    scores = torch.matmul(q.double().view(1, kv_heads, -1, dim), k.double().transpose(2, 3)) * 0.3
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    expected = torch.matmul(torch.softmax(scores, -1), v.double()).view(1, heads, 1, dim)
    assert difference(native.attend_one(q, k, v, 0.3, softcap), expected) < ATTENTION


@active
@pytest.mark.parametrize("threads", [1, 2])
def test_matrices_of_several_formats_in_one_go_equal_each_alone(threads: int) -> None:
    x, before = normal(1, 1, 96), torch.get_num_threads()
    codes = (normal(320, 96) * 4 + 8).round().clamp(0, 15).to(torch.int32)
    int4 = Matrix(packed(codes, ops._decided()[1]), normal(3, 320, 2).to(torch.bfloat16))
    int8 = Matrix((normal(70, 96) * 30).to(torch.int8), normal(70).abs())
    dense = [Matrix(w, w) for w in (normal(1031, 96), normal(5, 96).to(torch.bfloat16))]
    try:
        torch.set_num_threads(threads)
        for chosen in ([int4, int8, dense[0]], [dense[0], dense[1]], [int8, int8], [dense[1]]):
            together = native.product(x, *chosen)
            assert together is not None
            for y, matrix in zip(together, chosen, strict=True):
                assert torch.equal(y, native.product(x, matrix)[0])  # type: ignore[index]
    finally:
        torch.set_num_threads(before)


@active
def test_attention_survives_scores_far_apart() -> None:
    keys = torch.zeros(1, 1, 200, 8)
    keys[0, 0, 7, 0], keys[0, 0, 150, 0] = 1000.0, 999.0
    values = normal(1, 1, 200, 8)
    q = torch.zeros(1, 1, 1, 8)
    q[..., 0] = 1.0
    expected = torch.softmax((q.double() @ keys.double().transpose(2, 3)), -1) @ values.double()
    assert difference(native.attend_one(q, keys, values, 1.0, None), expected) < ATTENTION


@active
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = normal(1, 1, 64)
    x[..., 40] = bad
    weight = normal(64, 64)
    codes = (weight * 4 + 8).round().clamp(0, 15).to(torch.int32)
    found = [
        dense_mv(x, weight),
        int8_mv(x, (weight * 30).to(torch.int8), torch.ones(64)),
        torch.ops.fuel.product(x, packed(codes, 16), torch.ones(2, 64, 2, dtype=torch.bfloat16), 16),
    ]
    for y in found:
        assert y is not None
        assert not y.isfinite().any()
    keys = normal(1, 2, 9, 16)
    keys[0, 1, 4] = float("nan")
    out = native.attend_one(normal(1, 4, 1, 16), keys, normal(1, 2, 9, 16), 1.0, None)
    assert out is not None
    assert out[0, :2].isfinite().all()
    assert out[0, 2:].isnan().all()


@active
def test_small_and_large_rows_keep_their_accuracy() -> None:
    """Each group of 32 has a scale of its own: one large element costs its neighbours, and nobody else."""
    weight = (normal(64, 96) * 30).round().to(torch.int8)
    for factor in (1e-20, 1e-4, 1e4, 1e20):
        x = normal(1, 1, 96) * factor
        expected = x.double() @ weight.double().T
        assert difference(int8_mv(x, weight, torch.ones(64)), expected) < PACKED
    x = normal(1, 1, 96)
    x[..., 5] = 3e4
    rest = weight.clone()
    rest[:, :32] = 0
    assert difference(int8_mv(x, rest, torch.ones(64)), x.double() @ rest.double().T) < PACKED


@active
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, weight = normal(1, 1, 576), normal(2048, 576)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(dense_mv(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(y is not None and torch.equal(y, found[0]) for y in found)


@active
def test_what_does_not_fit_is_left_to_torch() -> None:
    x, weight = normal(1, 1, 96), normal(8, 96)
    assert dense_mv(normal(1, 2, 96), weight) is None, "two rows"
    assert dense_mv(normal(2, 1, 96), weight) is None, "a batch of two"
    assert dense_mv(normal(1, 1, 90), normal(8, 90)) is None, "a width that is no multiple of 16"
    assert dense_mv(x, normal(96, 8).T) is None, "a transposed weight"
    assert dense_mv(x, weight.double()) is None
    assert int8_mv(normal(1, 1, 80), torch.ones(8, 80, dtype=torch.int8), torch.ones(8)) is None
    assert int4_mv(normal(1, 1, 96), torch.ones(80, 48, dtype=torch.uint8), torch.ones(3, 80, 2)) is None
    q, keys = normal(1, 4, 1, 16), normal(1, 2, 9, 16)
    assert native.attend_one(normal(1, 4, 2, 16), keys, keys, 1.0, None) is None, "two queries"
    assert native.attend_one(normal(1, 4, 1, 12), keys[..., :12], keys[..., :12], 1.0, None) is None
    assert native.attend_one(q, keys.transpose(2, 3).contiguous().transpose(2, 3), keys, 1.0, None) is None
    # A slice of a longer row is read where it lies.
    wide = normal(1, 1, 200)
    assert difference(dense_mv(wide[..., 7:103], weight), wide[..., 7:103].double() @ weight.double().T) < DENSE


# -- building and keeping them ---------------------------------------------------------------------------------------

SCRIPT = """
import warnings; warnings.simplefilter("error")
import torch
from fuel_core import native
native.prepare()
from fuel_core.native import build
if build._running is not None:
    build._running.process.wait()
print(native.is_active(), "|", native.status())
x = torch.ones(1, 1, 32)
w = torch.ones(4, 32)
print(native.product(x, native.Matrix(w, w)) is not None)
"""


def fresh(cache: Path, **env: str) -> str:
    """What another process says of the kernels."""
    where = {"PYTHONPATH": str(ROOT), "FUEL_CACHE": str(cache), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **where}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@active
def test_kernels_are_built_once_and_only_trusted_whole(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert fresh(cache).startswith("True")
    (path,) = cache.rglob("*.so")
    first = path.stat().st_mtime_ns
    assert fresh(cache).startswith("True")
    assert path.stat().st_mtime_ns == first, "found, not built again"
    # Changed inside: such a file loads without an error, or kills the process.
    whole = path.read_bytes()
    path.write_bytes(whole[:9000] + bytes(2000) + whole[11000:])
    assert fresh(cache).startswith("True")
    (path,) = cache.rglob("*.so")
    assert path.read_bytes() == whole


@active
def test_without_the_kernels_torch_does_the_work(tmp_path: Path) -> None:
    off = fresh(tmp_path, FUEL_NATIVE="0")
    assert off.startswith("False | turned off by FUEL_NATIVE=0")
    assert off.endswith("False\n")
    assert "no C++ compiler" in fresh(tmp_path, PATH="/nowhere", CXX="")
    failing = tmp_path / "g++"
    failing.write_text("#!/bin/sh\necho 'cannot do this' >&2\nexit 1\n")
    failing.chmod(0o755)
    assert f"False | {failing} failed: cannot do this" in fresh(tmp_path / "empty", CXX=str(failing))
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "expected a folder, found a file" in fresh(blocked)


def test_a_layout_nobody_knows_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", lambda codes, _: codes.to(torch.uint8))
    assert ops._block_half() == 0


def test_kernels_that_disagree_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ops, "_agrees", lambda half: False)
    monkeypatch.setattr(build, "shared_object", lambda: Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    with pytest.warns(UserWarning, match="torch's own ops are used"):
        assert ops._load() == (False, 0)
