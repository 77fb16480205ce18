"""Is what comes out right? Against the oracle, never only against another run of the same code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn

from fuel_core.backbone import DecodeBackbone
from fuel_core.layers import Embedding, ExpertLinear, Linear
from fuel_core.layers.weight_formats import FORMATS
from fuel_core.persistent_decode import InferenceContext, forward_with_kv_context
from fuel_core.testing.registry import check, fail
from fuel_core.testing.workspace import PATHS, Case

FORMAT_BOUNDS: Final[Mapping[str, float]] = {"f32": 2e-5, "bf16": 0.08, "f16": 0.015, "int8": 0.12, "int4": 1.2}
"""Weight format -> largest error of a logit relative to the largest logit, with float32 activations.

Random weights have nothing to average over: real models do better. Largest genuine errors on the toy and on the
families of this repository: f32 1.7e-6, bf16 0.03, f16 4e-3, int8 0.044, int4 0.71. A bias dropped costs 0.3 and more;
what int4 cannot show beside its own rounding, the next bound does.
"""
EFFECTIVE_BOUND: Final = 0.06
"""A compressed format against plain float32 with the very numbers it stands for; genuine errors up to 0.026."""
HALF_BOUND: Final = 0.1
"""bfloat16 weights and activations; genuine errors up to 0.039."""


@check()
def fresh_steps(case: Case) -> None:
    """Wrong arithmetic: whatever a layer does otherwise than the model it stands for, on either offset path (D1)."""
    ids = case.ids(case.length)
    for path in PATHS:
        run = case.run(case.shared, ids, [case.prompt], path=path, plan="off")
        case.rows_close(run, case.truth(ids), f"fresh steps on the {path} path")


@check()
def held_steps(case: Case) -> None:
    """A held plan that keeps something of the step it was built on, at the second token or later (D2)."""
    ids = case.ids(case.length)
    for path in PATHS:
        run = case.run(case.shared, ids, [case.prompt], path=path)
        case.rows_close(run, case.truth(ids), f"held steps on the {path} path")
        case.require(run.ctx.stats.rebinds == len(ids) - case.prompt - 1, f"no reuse: {run.ctx.stats}")


@check()
def chunked_prompts(case: Case) -> None:
    """A prompt whose result depends on how it is cut: wrong positions or masks within a chunk."""
    ids = case.ids(case.length)
    for path in PATHS:
        for chunks in ([4, 3, 2], [2, 1, 6], [1] * 9, [len(ids)]):
            run = case.run(case.shared, ids, chunks, path=path)
            case.rows_close(run, case.truth(ids), f"chunks of {chunks} on the {path} path")


@check(needs=("window",))
def windows_crossed_twice(case: Case) -> None:
    """A window one position off, or one that only holds until the cache is longer than two of it."""
    if case.window is None:
        return
    count = 3 * case.window + 4
    ids = case.ids(count, stream=1)
    for path in PATHS:
        for chunks in ([], [case.window + 1], [1, case.window + 2]):
            run = case.run(case.shared, ids, chunks, path=path)
            case.rows_close(run, case.truth(ids), f"three windows of {case.window} on the {path} path")


@check()
def every_position(case: Case) -> None:
    """All positions asked for at once that differ from the same positions one by one."""
    ids = case.ids(case.length)
    for path in PATHS:
        ctx = InferenceContext("cpu", offset_path=path)
        rows = forward_with_kv_context(case.shared, ids, case.cache(case.shared, len(ids)), ctx, all_positions=True)
        case.close(rows, case.truth(ids), f"all positions on the {path} path")


@check()
def the_last_slot(case: Case) -> None:
    """A one-token prompt, and a cache that is filled to its last position."""
    ids = case.ids(13, stream=1)
    for path in PATHS:
        run = case.run(case.shared, ids, path=path, capacity=len(ids))
        case.rows_close(run, case.truth(ids), f"up to the last slot on the {path} path")


@check()
def high_positions(case: Case) -> None:
    """Frequencies that are right only near the start: a scaling ignored, angles computed in too few bits."""
    ids = case.ids(221, stream=1)
    limit = getattr(case.spec, "max_position_embeddings", len(ids))
    ids = ids[: max(16, min(len(ids), limit))]
    run = case.run(case.shared, ids, [len(ids) - 6])
    case.rows_close(run, case.truth(ids), "at high positions", case.declaration.deep_tolerance)


@check()
def weight_formats(case: Case) -> None:
    """Arithmetic that goes round `layers.linear`, and so reads a compressed weight as if it were plain."""
    bounds = {**FORMAT_BOUNDS, **case.declaration.format_bounds}
    ids = case.ids(case.prompt + 6)
    for name in FORMATS:
        if name not in bounds:
            fail(
                f"weight format {name!r} has no bound; add one to FORMAT_BOUNDS, or to format_bounds of the declaration"
            )
        model = case.model(weights=name)
        run = case.run(model, ids, [case.prompt])
        case.rows_close(run, case.truth(ids), f"weights in {name}", bounds[name])
        if FORMATS[name].compressed:
            expected = case.run(_effective(case, model), ids, [case.prompt], plan="off")
            for (index, row), (_, plain) in zip(run.rows, expected.rows, strict=True):
                case.close(row, plain, f"{name} against the numbers it stands for, position {index}", EFFECTIVE_BOUND)


def _effective(case: Case, model: DecodeBackbone) -> DecodeBackbone:
    """The same model in plain float32 with the numbers that its compressed weights stand for."""
    plain = case.model(weights="f32")
    modules = dict(plain.named_modules())
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Linear):
                weight = module.weight_format.matmul(torch.eye(module.in_features), module, None).t()
            elif isinstance(module, ExpertLinear):
                eye = torch.eye(module.in_features)
                ones = [module.one(_nth(number)) for number in range(module.n_experts)]
                weight = torch.stack([one.weight_format.matmul(eye, one, None).t() for one in ones])
            elif isinstance(module, Embedding):
                weight = module.weight_format.lookup(torch.arange(module.num_embeddings)[None], module)[0]
            else:
                continue
            modules[name].weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return plain


def _nth(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda stack: stack[number]


@check()
def half_precision_activations(case: Case) -> None:
    """Norms, softmax or angles computed in bfloat16, and dtypes that do not meet."""
    model = case.model(weights="bf16")
    ids = case.ids(case.prompt + 6)
    for path in PATHS:
        run = case.run(model, ids, [case.prompt], path=path, dtype=torch.bfloat16)
        case.rows_close(run, case.truth(ids), f"bfloat16 on the {path} path", HALF_BOUND)


@check()
def embedding_rows(case: Case) -> None:
    """An embedding that is cast or scaled by the family: the core scales in float32 and casts afterwards."""
    table = case.shared.decode_token_embedding()
    ids = torch.tensor([case.ids(5)])
    rows = table(ids)
    case.require(rows.dtype == torch.float32, f"the embedding must give float32 rows, found {rows.dtype}")
    weight = table.weight.detach().float()[ids[0]]
    case.require(
        torch.equal(rows[0], weight), "the embedding gives other rows than its table holds; scale by embed_scale"
    )
