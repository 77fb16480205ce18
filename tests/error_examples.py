"""One message of every error, produced by the code: what docs/errors.md shows."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from plugin_site import Site
from safetensors.torch import load_file, save_file
from toy_backbone import ToyBackbone, ToyConfig, fill, new_cache, toy
from toy_family import install_toy_family, write_toy_checkpoint

import fuel_core as fuel
from fuel_core.checkpoint.base import reading
from fuel_core.discovery import family_for
from fuel_core.persistent_decode import rebind_and_realize_prebuilt
from fuel_core.testing import Conformance, reference_oracle


def _folder(tmp_path: Path, **config: Any) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _checkpoint(tmp_path: Path, site: Site) -> None:
    with reading(tmp_path / "model"):
        raise OSError(errno.ENOMEM, "Cannot allocate memory", str(tmp_path / "model" / "model.safetensors"))


def _not_found(tmp_path: Path, site: Site) -> None:
    fuel.open_checkpoint(tmp_path / "model")


def _corrupt(tmp_path: Path, site: Site) -> None:
    folder = _folder(tmp_path)
    (folder / "config.json").write_text("{")
    fuel.open_checkpoint(folder)


def _unsupported(tmp_path: Path, site: Site) -> None:
    config = {"model_type": "zebra", "quantization_config": {"quant_method": "gptq"}}
    fuel.RawConfig.from_config(config).reject_quantized()


def _config(tmp_path: Path, site: Site) -> None:
    fuel.ConfigReader(fuel.RawConfig.from_config({"vocab_size": "many"}), family="zebra").int("vocab_size")


def _weights(tmp_path: Path, site: Site) -> None:
    install_toy_family(site)
    folder = write_toy_checkpoint(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.gain"] = tensors.pop("norm.weight")
    save_file(tensors, folder / "model.safetensors")
    fuel.load(folder)


def _family_not_found(tmp_path: Path, site: Site) -> None:
    family_for(fuel.open_checkpoint(_folder(tmp_path, model_type="okapi")))


def _family_conflict(tmp_path: Path, site: Site) -> None:
    site.install("fuel-zebra", family="zebra")
    site.install("acme-zebra", family="zebra")
    family_for(fuel.open_checkpoint(_folder(tmp_path, model_type="zebra")))


def _family_broken(tmp_path: Path, site: Site) -> None:
    site.install("fuel-quagga", family="quagga", source="raise ImportError('no stripes')\n")
    family_for(fuel.open_checkpoint(_folder(tmp_path, model_type="quagga")))


def _tokenizer(tmp_path: Path, site: Site) -> None:
    install_toy_family(site)
    folder = write_toy_checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    fuel.load(folder).generate("Once upon a time")


def _chat_template(tmp_path: Path, site: Site) -> None:
    install_toy_family(site)
    fuel.load(write_toy_checkpoint(tmp_path / "model")).chat("Hello")


def _decode(tmp_path: Path, site: Site) -> None:
    model = toy()
    fuel.forward_decode_step(model, [67], new_cache(model), fuel.InferenceContext("cpu"))


def _capacity(tmp_path: Path, site: Site) -> None:
    model = toy()
    fuel.forward_decode_step(model, [1] * 33, new_cache(model), fuel.InferenceContext("cpu"))


def _geometry(tmp_path: Path, site: Site) -> None:
    model = toy()
    fuel.forward_decode_step(model, [1], new_cache(toy(num_hidden_layers=2)), fuel.InferenceContext("cpu"))


def _cache_state(tmp_path: Path, site: Site) -> None:
    new_cache(toy()).truncate_to(3)


def _plan(tmp_path: Path, site: Site) -> None:
    model = toy()
    rebind_and_realize_prebuilt(model, [1], new_cache(model), fuel.InferenceContext("cpu"), None)


class _Branching(ToyBackbone):
    def decode_apply_layer(self, layer_idx: int, inputs: fuel.DecodeLayerInputs) -> torch.Tensor:
        if inputs.cached_len > 4:
            return inputs.h
        return super().decode_apply_layer(layer_idx, inputs)


def _recording(tmp_path: Path, site: Site) -> None:
    model = _Branching(ToyConfig())
    fill(model)
    fuel.forward_decode_step(model, [1], new_cache(model), fuel.InferenceContext("cpu", plan="recorded"))


class _OfItsOwn(ToyBackbone):
    """Records a head that no other model shares, so that rewriting it is nobody else's business."""

    def decode_final_norm_and_head(self, h: torch.Tensor) -> torch.Tensor:
        return super().decode_final_norm_and_head(h) * 1.125


def _topology(tmp_path: Path, site: Site) -> None:
    model, ctx = _OfItsOwn(ToyConfig()), fuel.InferenceContext("cpu", plan="recorded")
    fill(model)
    fuel.forward_decode_step(model, [1], new_cache(model), ctx)
    (session,) = ctx.sessions
    session.plan.program.segments[-1].recording.rewrite(lambda graph: graph.erase_node(_last_op(graph)))
    session.plan.run(session.bound.symbols)


def _last_op(graph: torch.fx.Graph) -> torch.fx.Node:
    """The last op, with its users sent to what it was made of: a rewrite that changes the op list."""
    node = [n for n in graph.nodes if n.op == "call_function"][-1]
    node.replace_all_uses_with(node.all_input_nodes[0])
    return node


def _conversation(tmp_path: Path, site: Site) -> None:
    install_toy_family(site)
    talk = fuel.Conversation(fuel.load(write_toy_checkpoint(tmp_path / "model", template=True)))
    talk.load(tmp_path / "talk.json")


def _backend(tmp_path: Path, site: Site) -> None:
    fuel.InferenceContext("cpu", plan="cuda_graph")


def _conformance(tmp_path: Path, site: Site) -> None:
    Conformance("zebra:FAMILY", {"plain": {}}, {"windows"}, reference_oracle(lambda *_: torch.zeros(1)))


def _generation(tmp_path: Path, site: Site) -> None:
    fuel.SamplingParams(temperature=-1)


def _non_finite(tmp_path: Path, site: Site) -> None:
    model = toy()
    model.lm_head.weight.data[3] = float("nan")
    list(fuel.Generation(model, [1, 2], new_cache(model), fuel.InferenceContext("cpu"), max_new_tokens=2))


EXAMPLES: dict[str, Callable[[Path, Site], None]] = {
    "CheckpointError": _checkpoint,
    "CheckpointNotFoundError": _not_found,
    "CheckpointCorruptError": _corrupt,
    "UnsupportedCheckpointError": _unsupported,
    "ConfigError": _config,
    "WeightsError": _weights,
    "FamilyNotFoundError": _family_not_found,
    "FamilyConflictError": _family_conflict,
    "FamilyBrokenError": _family_broken,
    "TokenizerError": _tokenizer,
    "ChatTemplateError": _chat_template,
    "DecodeError": _decode,
    "CapacityError": _capacity,
    "GeometryError": _geometry,
    "CacheStateError": _cache_state,
    "PlanError": _plan,
    "RecordingError": _recording,
    "TopologyChanged": _topology,
    "ConversationError": _conversation,
    "BackendUnavailableError": _backend,
    "ConformanceError": _conformance,
    "GenerationError": _generation,
    "NonFiniteLogitsError": _non_finite,
}
"""Class -> what raises it. The two that nothing raises by itself, FuelError and FamilyError, are bases."""
