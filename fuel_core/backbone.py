"""THE CONTRACT between the core and a model family.

A family implements the ``decode_*`` hooks of ``DecodeBackbone``; everything about plans, offsets, sessions and
caches stays on the core's side. The core decides identity here too, so that no family can forget a field: the
shape key takes in every field of the resolved config unless the family lists it as bound.

Shape letters: B batch (1), T tokens of this step, D hidden, V vocab.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from fuel_core import native
from fuel_core.decode_shape import Component, ModelInstanceId, ShapeKey, canonical
from fuel_core.errors import ConfigError, GeometryError
from fuel_core.kv_cache import KvCache, LayerStateSpec, kv_dims, specs_component
from fuel_core.layers.linear import Embedding, FormattedWeight
from fuel_core.mask_and_rope import MaskPlan, RopePlan
from fuel_core.profiling import span
from fuel_core.token_data import (
    DecodeLayerInputs,
    DecodeTokenData,
    compute_decode_token_host,
    upload_decode_token_data,
)

__all__ = ["DecodeBackbone", "DecodeDims", "DecodeLayerInputs", "PersistentDecodeModel"]


@dataclass(frozen=True, slots=True)
class DecodeDims:
    """Sizes of the step, apart from the state (which the state specs describe)."""

    n_layers: int
    hidden: int
    """D: width of the residual stream."""
    vocab: int
    """V: rows of the head."""
    rope_width: int
    """Features that are rotated: head_dim, or less under partial rotary."""
    embed_scale: float | None = None
    """Multiplier of the embeddings, applied in float32 before the cast; None emits no op at all."""
    n_kv_heads: int | None = None
    """Derived from the state specs; None where layers differ or keep named slots."""
    head_dim: int | None = None
    """Derived from the state specs; None where layers differ or keep named slots."""

    @classmethod
    def of(
        cls,
        specs: Sequence[LayerStateSpec],
        *,
        hidden: int,
        vocab: int,
        rope_width: int,
        embed_scale: float | None = None,
    ) -> DecodeDims:
        """Dims with the layer count and the kv sizes taken from the state specs."""
        n_kv_heads, head_dim = kv_dims(specs)
        return cls(len(specs), hidden, vocab, rope_width, embed_scale, n_kv_heads, head_dim)


class PersistentDecodeModel(nn.Module, ABC):
    """What the rebind driver needs of a model: identity, plans, and one step's bound data.

    A model with a build body of its own implements this much; ``DecodeBackbone`` adds the hooks of the shared
    build path.
    """

    def __init__(self) -> None:
        super().__init__()
        self._init_identity()

    def _init_identity(self) -> None:
        self._instance_id = ModelInstanceId.next()
        self._epoch = 0
        self._config_version = 0
        self._config_seen: Any = None
        self._weight_snapshot: _WeightSnapshot | None = None
        self._identity_lock = threading.RLock()
        self._key_memo: dict[Hashable, ShapeKey] = {}
        self._plan_memo: dict[str, tuple[int, Any]] = {}
        self._plan_override: dict[str, Any] = {}
        # Filled by the build path: what was recorded for this model, by (epoch, structure).
        self._programs: dict[Hashable, Any] = {}

    _IDENTITY_STATE = (
        "_instance_id",
        "_config_seen",
        "_weight_snapshot",
        "_identity_lock",
        "_key_memo",
        "_plan_memo",
        "_programs",
    )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in self._IDENTITY_STATE:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # copy, deepcopy and unpickling all pass here: whatever they made is another model with other storage.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        override = state.get("_plan_override", {})
        epoch, version = state.get("_epoch", 0), state.get("_config_version", 0)
        self._init_identity()
        self._plan_override = dict(override)
        self._epoch, self._config_version = epoch, version

    # -- hooks --------------------------------------------------------------------------------------

    @abstractmethod
    def decode_family(self) -> str:
        """The family's name; it stands in every error that the shared path raises."""

    @abstractmethod
    def layer_state_specs(self) -> Sequence[LayerStateSpec]:
        """What each layer keeps; the one source of state geometry."""

    @abstractmethod
    def decode_dims(self) -> DecodeDims:
        """Sizes of the step."""

    @abstractmethod
    def decode_mask_plan(self) -> MaskPlan:
        """Which layers attend through a window. Not defaulted: a default is silently wrong for who forgets it."""

    @abstractmethod
    def decode_rope_plan(self) -> RopePlan:
        """Which layers rotate with which frequencies. Not defaulted, for the same reason."""

    @abstractmethod
    def decode_config(self) -> Any:
        """The frozen, resolved spec (a dataclass instance)."""

    def decode_bound_fields(self) -> frozenset[str]:
        """Names of config fields that are bound, not baked: they stay out of the shape key.

        Listing a field promises that a change of it reaches the outputs through bound data alone, without a
        rebuild. A field that decides structure must not be listed.
        """
        return frozenset()

    # -- plans --------------------------------------------------------------------------------------

    @property
    def state_specs(self) -> tuple[LayerStateSpec, ...]:
        """``layer_state_specs()`` of the config in force, asked for once."""
        specs: tuple[LayerStateSpec, ...] = self._plan("state", lambda: tuple(self.layer_state_specs()))
        return specs

    def _plan(self, kind: str, hook: Callable[[], Any]) -> Any:
        if kind in self._plan_override:
            return self._plan_override[kind]
        version = self._config_now()
        memo = self._plan_memo.get(kind)
        if memo is None or memo[0] != version:
            memo = self._plan_memo[kind] = (version, hook())
        return memo[1]

    def _config_now(self) -> int:
        """Version of the config in force. One that was assigned past ``reconfigure`` counts as a change too."""
        config = self.decode_config()
        if config is not self._config_seen:
            with self._identity_lock:
                if self._config_seen is not None and config != self._config_seen:
                    self._config_version += 1
                self._config_seen = config
        return self._config_version

    @property
    def mask_plan(self) -> MaskPlan:
        """The mask plan in force, read at every entry. Assign another to change it on a live model."""
        plan: MaskPlan = self._plan("mask", self.decode_mask_plan)
        return plan

    @mask_plan.setter
    def mask_plan(self, plan: MaskPlan) -> None:
        if not isinstance(plan, MaskPlan):
            raise ConfigError(
                f"{self.decode_family()}: mask_plan must be a MaskPlan, found {type(plan).__name__}; assign one"
            )
        self._check_layers("mask_plan", plan.n_layers)
        self._plan_override["mask"] = plan

    @property
    def rope_plan(self) -> RopePlan:
        """The RoPE plan in force, read at every entry. Assign another to change it on a live model."""
        plan: RopePlan = self._plan("rope", self.decode_rope_plan)
        return plan

    @rope_plan.setter
    def rope_plan(self, plan: RopePlan) -> None:
        if not isinstance(plan, RopePlan):
            raise ConfigError(
                f"{self.decode_family()}: rope_plan must be a RopePlan, found {type(plan).__name__}; assign one"
            )
        self._check_layers("rope_plan", plan.n_layers)
        head_dim = self.decode_dims().head_dim
        if head_dim is not None and plan.width > head_dim:
            raise GeometryError(
                f"{self.decode_family()}: rope_plan rotates {plan.width} features, a head has {head_dim}; use "
                f"variants of width {head_dim} or less"
            )
        self._plan_override["rope"] = plan

    def _check_layers(self, what: str, n_layers: int) -> None:
        expected = len(self.layer_state_specs())
        if n_layers != expected:
            raise GeometryError(
                f"{self.decode_family()}: {what} covers {n_layers} layers, the model has {expected}; "
                f"make one for {expected}"
            )

    def reconfigure(self, **bound: Any) -> None:
        """Change bound config fields on the live model: held plans follow without a rebuild.

        Raises ConfigError for a field that is not bound (build another model for those) or does not exist.
        A plan that was assigned (``mask_plan``, ``rope_plan``) is dropped in favour of the new config's.
        """
        config = self.decode_config()
        names = {field.name for field in dataclasses.fields(config)}
        for name in bound:
            if name not in names:
                raise ConfigError(
                    f"{self.decode_family()}: reconfigure() of a bound field expected, found {name!r}; bound fields "
                    f"are {sorted(self.decode_bound_fields())}"
                )
            if name not in self.decode_bound_fields():
                raise ConfigError(
                    f"{self.decode_family()}: field {name!r} is baked into plans and cannot be changed on a live "
                    f"model; bound fields are {sorted(self.decode_bound_fields())}"
                )
        with self._identity_lock:
            self._config_now()
            self._set_config(dataclasses.replace(config, **bound))
            try:
                mask, rope = self.decode_mask_plan(), self.decode_rope_plan()
            except BaseException as error:
                self._set_config(config)
                if isinstance(error, AttributeError | TypeError | ValueError):
                    raise ConfigError(
                        f"{self.decode_family()}: reconfigure() with {sorted(bound)} makes no plan ({error}); give "
                        "values of the types that the config has"
                    ) from error
                raise
            version = self._config_now()
            self._plan_memo = {"mask": (version, mask), "rope": (version, rope)}
            self._plan_override.clear()

    def _set_config(self, config: Any) -> None:
        """Install a replaced config. Backbones keep it as ``self.config``; override where it lives elsewhere."""
        self.config = config

    # -- identity -----------------------------------------------------------------------------------

    @property
    def instance_id(self) -> ModelInstanceId:
        """The never-recycled id of this constructed model."""
        return self._instance_id

    def weights_epoch(self) -> int:
        """How often weight storage was swapped under this model; checked against the live parameters.

        Replaced parameters, buffers or submodules, moved storage, another dtype or device all bump it. In-place
        writes do not: a held plan reads the same storage and follows them.
        """
        snapshot = self._weight_snapshot
        if snapshot is not None and snapshot.is_current():
            return self._epoch
        with self._identity_lock:
            snapshot = self._weight_snapshot
            if snapshot is None:
                self._weight_snapshot = _WeightSnapshot(self)
            elif not snapshot.is_current():
                self._weight_snapshot = _WeightSnapshot(self)
                self._epoch += 1
                self._key_memo.clear()
                self._programs.clear()
            return self._epoch

    def bump_weights_epoch(self) -> None:
        """Declare that weights changed in a way no pointer shows (requantised in place, say)."""
        with self._identity_lock:
            self._weight_snapshot = None
            self._epoch += 1
            self._key_memo.clear()
            self._programs.clear()

    def content_version(self) -> object:
        """What positions computed now depend on: the model, its weights, its config and the values of both plans.

        A cache remembers it for every position, so that a prompt prefix is taken over only from the very model, as it
        is now. As of the last ``weights_epoch()``, which every step takes; in-place edits show after
        ``bump_weights_epoch()``.
        """
        return (self._instance_id, self._epoch, self.decode_config(), self.mask_plan, self.rope_plan)

    def decode_shape_key(self) -> ShapeKey:
        """The identity that a held plan of this model is baked against. Final: families cannot narrow it.

        Family, instance, weights epoch, dims, state specs, plan structure, weight dtypes and formats, and every
        config field that is not declared bound. Memoised per epoch, config version and plan structure.
        """
        epoch = self.weights_epoch()
        mask, rope = self.mask_plan.structure(), self.rope_plan.structure()
        memo_key = (epoch, self._config_now(), mask, rope)
        key = self._key_memo.get(memo_key)
        if key is None:
            key = ShapeKey.of(self._key_components(epoch, mask, rope))
            self._key_memo[memo_key] = key
        return key

    def structure_key(self) -> ShapeKey:
        """The shape key without instance and epoch: it names recordings and code, which models may share."""
        return self.decode_shape_key().without("instance", "epoch")

    def _key_components(self, epoch: int, mask: Component, rope: Component) -> dict[str, Component]:
        config, bound = self.decode_config(), self.decode_bound_fields()
        components: dict[str, Component] = {
            "family": self.decode_family(),
            "model": f"{type(self).__module__}.{type(self).__qualname__}",
            "instance": self._instance_id.get(),
            "epoch": epoch,
        }
        for field in dataclasses.fields(self.decode_dims()):
            components[f"dims.{field.name}"] = getattr(self.decode_dims(), field.name)
        components["state"] = specs_component(self.layer_state_specs())
        components["mask_plan"] = mask
        components["rope_plan"] = rope
        components["weights"] = _weights_component(self)
        for field in dataclasses.fields(config):
            # A field left out of comparison is provenance, not configuration.
            if field.name not in bound and field.compare:
                components[f"config.{field.name}"] = canonical(getattr(config, field.name))
        return components

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("decode_shape_key", "structure_key", "_key_components", "weights_epoch"):
            if getattr(cls, name) is not getattr(PersistentDecodeModel, name):  # a mixin's counts as well
                raise TypeError(
                    f"{cls.__qualname__} overrides {name}: identity is the core's, so that no field can be forgotten. "
                    "Put what decides structure into the config"
                )

    # -- one step's bound data ------------------------------------------------------------------------

    def build_decode_token_data(
        self,
        token_ids: Sequence[int],
        cache: KvCache,
        *,
        device_offset: bool,
        mask_columns: int | None,
        sequence_len: int | None = None,
        into: DecodeTokenData | None = None,
    ) -> DecodeTokenData:
        """Compute and upload one step's bound data; the one implementation for build and rebind.

        mask_columns: columns of the mask, None when nothing reads it. sequence_len: positions of the whole sequence
        where it goes on after this step. into: the buffers a held plan owns.
        """
        with span("fuel.token_data"):
            host = compute_decode_token_host(
                self.mask_plan,
                self.rope_plan,
                token_ids,
                cache.cached_len,
                mask_columns=mask_columns,
                sequence_len=sequence_len,
            )
        with span("fuel.upload"):
            return upload_decode_token_data(
                host,
                rope_plan=self.rope_plan,
                n_mask_variants=self.mask_plan.n_variants,
                dtype=cache.dtype,
                device=cache.device,
                device_offset=device_offset,
                mask_columns=cache.max_seq_len,
                into=into,
            )


class DecodeBackbone(PersistentDecodeModel):
    """A model on the shared build path. Subclasses keep the resolved spec as ``self.config``."""

    config: Any

    def decode_config(self) -> Any:
        return self.config

    @abstractmethod
    def decode_token_embedding(self) -> Embedding:
        """The token embedding module."""

    @abstractmethod
    def decode_apply_layer(self, layer_idx: int, inputs: DecodeLayerInputs) -> Tensor:
        """One layer: reads ``inputs``, writes its state in place, returns the next ``h [B, T, D]``."""

    @abstractmethod
    def decode_final_norm_and_head(self, h: Tensor) -> Tensor:
        """``h [B, rows, D]`` -> logits ``[B, rows, V]``."""

    def tied_weights(self) -> tuple[tuple[str, str], ...]:
        """Pairs (parameter that takes, parameter it shares) of this config; empty when nothing is tied."""
        return ()


def _weights_component(model: nn.Module) -> Component:
    """Dtype, and packed format where there is one, of every parameter and buffer."""
    formats = []
    for name, module in model.named_modules():
        packed = getattr(module, "packed_format", None)
        if isinstance(module, FormattedWeight) and packed is not None:
            formats.append((name, packed))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    dtypes: list[Component] = [(name, str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors]
    return (tuple(dtypes), tuple(formats))


class _WeightSnapshot:
    """Which tensors stand where under a model, to notice any of them replaced or moved.

    Compared once a step, so it is flat lists that are walked without a Python instruction for each tensor.
    """

    __slots__ = ("filled", "held", "places", "pointers", "scattered", "size", "tensors")

    def __init__(self, model: nn.Module) -> None:
        # Places that hold nothing yet count: a bias or an adapter put there later changes what the model computes.
        self.places: list[dict[str, Any]] = [
            held for m in model.modules() for held in (m._parameters, m._buffers, m._modules)
        ]
        self.filled = [held for held in self.places if held]
        # What stands there; kept alive, so that no other object can come to look like it.
        self.held = [value for held in self.filled for value in held.values()]
        self.size = len(self.held)
        self.tensors = [value for value in self.held if isinstance(value, Tensor)]
        self.pointers = [tensor.data_ptr() for tensor in self.tensors]
        self.scattered = native.Scattered([*self.places, *self.tensors])

    def is_current(self) -> bool:
        self.scattered.touch()
        values: Iterator[object] = chain.from_iterable(map(dict.values, self.filled))
        return (
            not any(map(operator.is_not, values, self.held))
            and sum(map(len, self.places)) == self.size
            and list(map(Tensor.data_ptr, self.tensors)) == self.pointers
        )
