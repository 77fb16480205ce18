"""A family for the toy backbone and a checkpoint folder that it serves, so that whole commands run without a plugin."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugin_site import Site
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from toy_backbone import ToyBackbone, ToyConfig, toy

from fuel_core.checkpoint import RawConfig
from fuel_core.families import Family, hookimpl

PLUGIN_SOURCE = "from toy_family import register_families\n"

TEMPLATE = "{% for m in messages %}w0 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w1{% endif %}"

TURNS = (
    "{% for m in messages %}{{ {'system': 'w2', 'user': 'w0', 'assistant': 'w1'}[m.role] }} {{ m.content }} </s> "
    "{% endfor %}{% if add_generation_prompt %}w1 {% endif %}"
)
"""A template that writes a reply as it was generated, so that a conversation is a prefix of its next prompt."""


@dataclass(frozen=True)
class ServedToyConfig(ToyConfig):
    max_position_embeddings: int = 256
    dtype: str = "float32"


def _resolve(raw: RawConfig) -> ServedToyConfig:
    given: dict[str, Any] = {
        name: raw[name] for name in ("num_hidden_layers", "window", "max_position_embeddings") if name in raw
    }
    return ServedToyConfig(**given, windowed_layers=(0, 2), sources={name: raw.source(name) for name in given})


TOY_FAMILY = Family(name="toy", model_types=("toy",), gguf_architectures=(), resolve_config=_resolve, build=ToyBackbone)


@hookimpl
def register_families(register: Any) -> None:
    register(TOY_FAMILY)


def install_toy_family(site: Site) -> None:
    """Make `model_type: toy` a checkpoint that an installed distribution serves."""
    site.install("fuel-toy", family="toy", module="fuel_toy", source=PLUGIN_SOURCE)


def write_toy_config(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"model_type": "toy", "num_hidden_layers": 3, "window": 5, "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_toy_checkpoint(folder: Path, *, template: bool | str = False) -> Path:
    """Config, weights and a tokenizer of 64 words `w0` .. `w63`, <s>, </s> and <unk>; </s> is the stop id 65.

    `template`: the chat template; True is TEMPLATE.
    """
    write_toy_config(folder)
    tensors = {name: parameter.data.contiguous() for name, parameter in toy().named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    words = [*(f"w{i}" for i in range(64)), "<s>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if template:
        settings["chat_template"] = TEMPLATE if template is True else template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
