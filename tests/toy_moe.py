"""A toy whose feed-forward is a mixture of experts, and its reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from toy_backbone import ToyBackbone, ToyConfig, _linear, _norm, attended, fill, matrix

from fuel_core import layers
from fuel_core.backbone import DecodeLayerInputs
from fuel_core.checkpoint.formats import Choice, pack
from fuel_core.layers.packed_formats import TensorRows
from fuel_core.layers.weight_formats import install

N_EXPERTS, N_CHOSEN, WIDTH = 6, 2, 64


class MoeToy(ToyBackbone):
    """The toy with experts in its layers 0 and 2 of 3."""

    SPARSE = (0, 2)

    def __init__(self, config: ToyConfig, renormalize: bool = True) -> None:
        super().__init__(config)
        for i in self.SPARSE:
            self.layers[i].router = layers.Router(config.hidden_size, N_EXPERTS, N_CHOSEN, renormalize=renormalize)
            self.layers[i].experts = layers.Experts(N_EXPERTS, config.hidden_size, WIDTH)
            for name in ("gate_proj", "up_proj", "down_proj"):
                delattr(self.layers[i], name)

    def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
        if layer_idx not in self.SPARSE:
            return super().decode_apply_layer(layer_idx, inputs)
        layer = self.layers[layer_idx]
        h = _attended(self, layer, inputs)
        x = layer.post_attention_layernorm(h)
        return h + layers.moe(inputs, x, layer.router, layer.experts)


def _attended(model: ToyBackbone, layer: nn.Module, inputs: DecodeLayerInputs) -> Tensor:
    c = model.config
    b, t, _ = inputs.h.shape
    x = layer.input_layernorm(inputs.h)
    q, k, v = (
        rows.view(b, t, -1, c.head_dim).transpose(1, 2)
        for rows in layers.project(x, layer.q_proj, layer.k_proj, layer.v_proj)
    )
    layers.write_state(inputs, "k", layers.rotate(k, inputs.cos, inputs.sin))
    layers.write_state(inputs, "v", v)
    q = layers.rotate(q, inputs.cos, inputs.sin)
    return inputs.h + layer.o_proj(layers.attend(inputs, q, c.head_dim**-0.5))


def moe_toy(seed: int = 0, renormalize: bool = True, **changes: object) -> MoeToy:
    model = MoeToy(ToyConfig(**changes), renormalize=renormalize)  # type: ignore[arg-type]
    fill(model, seed)
    return model


def pack_experts(model: nn.Module, word: str) -> None:
    """Store every stack of experts in a format."""
    for module in model.modules():
        if isinstance(module, layers.ExpertLinear):
            packed = pack(Choice(word), [TensorRows(one) for one in module.weight])
            install(module, packed.format.packed_as, packed.tensors)


def expert_matrices(module: layers.ExpertLinear) -> list[Tensor]:
    """The matrix that each expert of a stack stands for, float64."""
    if module.packed_format is None:
        return list(module.weight.double())
    shape = (module.out_features, module.in_features)
    stored = dict(module.named_parameters())
    return [
        module.weight_format.unpacked({name: p[e] for name, p in stored.items()}, shape, 0, shape[0]).double()
        for e in range(module.n_experts)
    ]


def every_expert(x: Tensor, router: layers.Router, experts: layers.Experts) -> Tensor:
    """The formula written out in float64, all experts for every row: ``[R, D] -> [R, D]``."""
    probabilities = torch.softmax(x.double() @ router.weight.double().T, -1)
    least = probabilities.sort(-1, descending=True).values[:, router.n_chosen - 1 : router.n_chosen]
    kept = torch.where(probabilities >= least, probabilities, 0.0)
    if router.renormalize:
        kept = kept / kept.sum(-1, keepdim=True)
    stacks = [expert_matrices(part) for part in (experts.gate_proj, experts.up_proj, experts.down_proj)]
    out = torch.zeros_like(x, dtype=torch.float64)
    for e, (gate, up, down) in enumerate(zip(*stacks, strict=True)):
        a = x.double() @ gate.T
        out += kept[:, e : e + 1] * ((a * torch.sigmoid(a) * (x.double() @ up.T)) @ down.T)
    return out


def moe_reference(model: MoeToy, ids: Sequence[int]) -> Tensor:
    """Logits ``[T, V]`` float64 of the whole sequence, every expert computed for every row."""
    c = model.config
    h = matrix(model.embed_tokens)[list(ids)]
    for i, layer in enumerate(model.layers):
        h = attended(model, i, h)
        x = _norm(h, layer.post_attention_layernorm.weight, c.rms_norm_eps)
        if i in model.SPARSE:
            h = h + every_expert(x, layer.router, layer.experts)
        else:
            gate, up = _linear(x, layer.gate_proj), _linear(x, layer.up_proj)
            h = h + _linear(gate * torch.sigmoid(gate) * up, layer.down_proj)
    return _linear(_norm(h, model.norm.weight, c.rms_norm_eps), model.lm_head)
