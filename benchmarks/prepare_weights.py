"""The weights of one GGUF file in other formats, so that engines that read different files read the same numbers.

    python benchmarks/prepare_weights.py MODEL.gguf q8_0 OUT.gguf      # f32, f16, bf16 or q8_0
    python benchmarks/prepare_weights.py MODEL.gguf bf16 OUT_FOLDER/   # f32 or bf16, for transformers

A GGUF file is dequantised and stored again: every matrix in the format asked for, vectors in float32. What quantisation
lost before is not given back; a comparison of speed needs equal weights, not good ones. A folder is written by
transformers from the file, which takes its `accelerate` as well.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

FORMATS = ("f32", "f16", "bf16", "q8_0")


def write_gguf(source: Path, weights: str, target: Path) -> None:
    """Store the matrices of `source` as `weights` in `target`; all other metadata is copied."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[weights.upper()]
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer states these itself
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{weights.upper()}" if weights != "f32" else "ALL_F32"])
            continue
        of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=of)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(source: Path, weights: str, target: Path) -> None:
    """Store `source` as a Hugging Face folder of dtype `weights`, tokenizer included."""
    import torch
    import transformers
    from safetensors.torch import save_file

    dtypes: dict[str, Any] = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=dtypes[weights])
    # Not model.save_pretrained(): it takes a model that came from a GGUF file for a quantised one, and refuses.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    model.config.dtype = dtypes[weights]
    model.config.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("weights", choices=FORMATS)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.out.exists():
        sys.exit(f"{args.out} exists; choose another name or remove it")
    # Under another name first: a run that was stopped leaves no half a file to be taken for a whole one.
    unfinished = args.out.with_name(args.out.name + ".unfinished")
    if args.out.suffix == ".gguf":
        write_gguf(args.model, args.weights, unfinished)
    else:
        write_folder(args.model, args.weights, unfinished)
    unfinished.rename(args.out)


if __name__ == "__main__":
    main()
