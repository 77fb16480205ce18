"""Stacked experts out of whichever tensors a file holds them in, so that loading sees one tensor for each stack.

Three spellings, all of which `layers.Experts` names in its docstring: stacks as they are; one matrix for each expert;
gate and up in one stack. A view of the checkpoint gives the second and the third the form of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuel_core.checkpoint.base import Checkpoint, TensorInfo
from fuel_core.errors import WeightsError

if TYPE_CHECKING:
    import torch

    from fuel_core.checkpoint.tokenizer_source import TokenizerSource
    from fuel_core.layers.packed_formats import Rows

__all__ = ["ExpertCheckpoint", "gather_experts"]

_FUSED = "gate_up_proj"
_HALVES = {"gate_proj": 0, "up_proj": 1}


@dataclass(frozen=True)
class _Stack:
    """One matrix from each of these tensors."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class _Half:
    """The first (0) or second (1) half of the rows of every matrix of one stack."""

    name: str
    which: int


def gather_experts(
    ck: Checkpoint, tensors: Mapping[str, str], stacks: Mapping[str, int]
) -> tuple[Checkpoint, dict[str, str]]:
    """Give every stack of experts one tensor.

    tensors: parameter -> tensor of the file. stacks: parameters of `layers.ExpertLinear` -> number of experts. Returns
    a view of `ck` that knows the tensors made up here, and the mapping with them in place of their parts.

    Raises WeightsError naming the matrices that a file with one for each expert lacks, or has too many of.
    """
    found, made = dict(tensors), dict[str, _Stack | _Half]()
    fused: set[str] = set()
    for parameter, count in stacks.items():
        if parameter in found:
            continue
        path = parameter.removesuffix(".weight")
        parent, _, projection = path.rpartition(".")
        whole = f"{parent}.{_FUSED}"
        if path in found:  # a stack is no module, so its tensor may go without the ending
            found[parameter] = found.pop(path)
        elif projection in _HALVES and whole in tensors:
            name = f"{tensors[whole]} ({projection})"
            found[parameter], made[name] = name, _Half(tensors[whole], _HALVES[projection])
            fused.add(whole)
        else:
            parts = _parts(ck, found, parent, f"{projection}.weight", count)
            if parts:
                name = f"{parts[0]} to {parts[-1]}"
                found[parameter], made[name] = name, _Stack(parts)
    for whole in fused:
        del found[whole]
    return (ExpertCheckpoint(ck, made), found) if made else (ck, found)


def _parts(ck: Checkpoint, found: dict[str, str], parent: str, ending: str, count: int) -> tuple[str, ...]:
    """Tensors of the experts under `parent`, in order, taken out of `found`; () where it has none of them."""
    before, after = f"{parent}.", f".{ending}"
    held = {
        int(number): key
        for key in found
        if key.startswith(before) and key.endswith(after) and (number := key[len(before) : -len(after)]).isdecimal()
    }
    if not held:
        return ()
    wrong = sorted(set(held) ^ set(range(count)))
    if wrong:
        shown = ", ".join(f"{before}{number}{after}" for number in wrong[:4])
        raise WeightsError(
            f"{ck.path}: expected a tensor for each of {count} experts, found {len(held)}; "
            f"{'missing' if wrong[0] not in held else 'too many'}: {shown}{', ...' if len(wrong) > 4 else ''}. Check "
            "the number of experts in the config and that the download is complete"
        )
    return tuple(found.pop(held[number]) for number in range(count))


class ExpertCheckpoint(Checkpoint):
    """A checkpoint and, under names of their own, the stacks that it holds in other tensors."""

    def __init__(self, ck: Checkpoint, made: Mapping[str, _Stack | _Half]) -> None:
        self.ck, self.made = ck, made
        self.path, self.raw = ck.path, ck.raw
        self.format = ck.format  # type: ignore[misc]

    @property
    def has_weights(self) -> bool:
        return self.ck.has_weights

    def tensor_names(self) -> list[str]:
        return sorted([*self.ck.tensor_names(), *self.made])

    def tensor_info(self, name: str) -> TensorInfo:
        source = self.made.get(name)
        if source is None:
            return self.ck.tensor_info(name)
        if isinstance(source, _Half):
            info = self.ck.tensor_info(source.name)
            shape = (*info.shape[:-2], info.shape[-2] // 2, info.shape[-1]) if len(info.shape) > 1 else info.shape
            return TensorInfo(shape, info.dtype_name)
        infos = [self.ck.tensor_info(part) for part in source.names]
        for part, info in zip(source.names, infos, strict=True):
            if info != infos[0]:
                raise WeightsError(
                    f"{self.path}: expected experts of one shape and type, found {source.names[0]} "
                    f"{list(infos[0].shape)} {infos[0].dtype_name} and {part} {list(info.shape)} {info.dtype_name}; "
                    "download the file again"
                )
        return TensorInfo((len(infos), *infos[0].shape), infos[0].dtype_name)

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        source = self.made.get(name)
        if source is None:
            return self.ck.tensor(name)
        if isinstance(source, _Half):
            return self.ck.tensor(source.name).chunk(2, dim=-2)[source.which].contiguous()
        first = self.ck.tensor(source.names[0])
        stack = torch.empty(len(source.names), *first.shape, dtype=first.dtype)
        for number, part in enumerate(source.names):
            stack[number] = self.ck.tensor(part)
            self.ck.release(part)
        return stack

    def matrices(self, name: str) -> list[Rows]:
        from fuel_core.layers.packed_formats import RowRange

        source = self.made.get(name)
        if source is None:
            return self.ck.matrices(name)
        if isinstance(source, _Stack):
            return [self.ck.rows(part) for part in source.names]
        wholes = self.ck.matrices(source.name)
        half = wholes[0].shape[0] // 2
        return [RowRange(whole, source.which * half, (source.which + 1) * half) for whole in wholes]

    def rows(self, name: str) -> Rows:
        return self.ck.rows(name)

    def is_mapped(self, name: str) -> bool:
        return name not in self.made and self.ck.is_mapped(name)

    def release(self, name: str) -> None:
        source = self.made.get(name)
        if source is None:
            self.ck.release(name)
        elif isinstance(source, _Stack):
            for part in source.names:
                self.ck.release(part)

    def tokenizer_files(self) -> TokenizerSource:
        return self.ck.tokenizer_files()
