"""Peak memory of loading a bfloat16 folder, beyond what importing torch costs, against the size of its weights.

Writes a checkpoint of random weights (about 0.5 GB, in two shards) into a temporary folder, then loads it and runs a
prompt of 8 tokens and 8 more, in a process of its own, and reads the process' peak resident memory from the system.
The parameters are mapped from the file, so a page counts once it was read.

    python benchmarks/load_memory.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

# VmHWM, not ru_maxrss: that one starts at what the parent had when it forked.
PEAK = """
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
IMPORT_ONLY = f"""
import torch
{PEAK}"""
LOAD = f"""
import sys
import fuel_core as fuel
llm = fuel.load(sys.argv[1], threads=1, plan=sys.argv[2])
llm.generate([1, 2, 3, 4, 5, 6, 7, 8], max_new_tokens=9, ignore_eos=True)
{PEAK}"""


def write_folder(folder: Path) -> int:
    """A checkpoint in two shards; returns the bytes of its weights."""
    import torch
    from safetensors.torch import save_file

    hidden, ffn, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    kv = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.mlp.gate_proj.weight": (ffn, hidden),
            f"{layer}.mlp.up_proj.weight": (ffn, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, ffn),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    generator = torch.Generator().manual_seed(0)
    names = sorted(shapes)
    total, weight_map = 0, {}
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{shard:05d}-of-00002.safetensors"
        tensors = {n: (torch.randn(shapes[n], generator=generator) * 0.02).to(torch.bfloat16) for n in part}
        save_file(tensors, folder / file)
        total += sum(t.numel() * 2 for t in tensors.values())
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return total


def peak_kib(code: str, *args: str) -> int:
    """Peak resident memory of a fresh interpreter that runs ``code``, in KiB."""
    done = subprocess.run([sys.executable, "-c", code, *args], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = write_folder(folder) / 2**20
        base = peak_kib(IMPORT_ONLY) / 1024
        print(f"weights {weights:.0f} MiB, importing torch {base:.0f} MiB")
        for plan in ("off", "recorded"):
            beyond = peak_kib(LOAD, str(folder), plan) / 1024 - base
            bound = 1.3 * weights + 400
            print(
                f"plan={plan}: {beyond:.0f} MiB beyond torch = {beyond / weights:.2f} x weights; bound {bound:.0f} MiB"
            )


if __name__ == "__main__":
    main()
