"""Time to load a checkpoint, in this checkout and in another one, by turns.

    python benchmarks/load_time.py MODEL --against ../other-checkout --pairs 9

A process of its own for each turn, which imports torch and fuel first and then loads the model several times: `first`
is the first load (imports of the family and of the tokenizer included), `load` the median of the others, `open` the
median of opening alone (headers and config). Seconds are CPU time of the process, so that what else the machine does
counts little. The ratio of each pair is this checkout over the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("first", "load", "open")

TURN = """
import json, statistics, sys, time
import torch
import fuel_core
from fuel_core.checkpoint import open_checkpoint
from fuel_core.llm import load

model, loads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)

def seconds(what):
    began = time.process_time()
    what()
    return time.process_time() - began

def opened():
    open_checkpoint(model).close()

print(json.dumps({
    "from": fuel_core.__file__,
    "first": seconds(lambda: load(model)),
    "load": statistics.median(seconds(lambda: load(model)) for _ in range(loads)),
    "open": statistics.median(seconds(opened) for _ in range(loads)),
}))
"""


def turn(checkout: Path, model: str, loads: int, cache: Path) -> dict[str, float]:
    """One process: name -> seconds of its CPU time."""
    plugins = [str(path) for path in sorted((checkout / "plugins").glob("fuel-*"))]
    settings = {"PYTHONPATH": os.pathsep.join([str(checkout), *plugins]), "OMP_NUM_THREADS": "1", "FUEL_COMPILE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", TURN, model, str(loads)],
        env={**os.environ, **settings, "FUEL_CACHE": str(cache / checkout.name)},
        cwd=checkout,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if Path(str(found.pop("from"))).resolve().parent.parent != checkout:
        sys.exit(f"{checkout}: expected its own fuel_core, found another one; is it a checkout?")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--against", type=Path, required=True, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--loads", type=int, default=5, help="loads a process, after the first")
    options = parser.parse_args()
    model, other = str(Path(options.model).resolve()), options.against.resolve()
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        for checkout in (other, ROOT):  # unmeasured: files into memory, kernels into the cache
            turn(checkout, model, 1, cache)
        for number in range(options.pairs):
            order = (other, ROOT) if number % 2 == 0 else (ROOT, other)
            found = {checkout: turn(checkout, model, options.loads, cache) for checkout in order}
            pairs.append((found[other], found[ROOT]))
    print("| | other, ms | this, ms | this / other | smallest to largest of the pairs |\n|---|---|---|---|---|")
    for name in NAMES:
        before, now = (statistics.median(pair[side][name] for pair in pairs) * 1e3 for side in (0, 1))
        ratios = sorted(now[name] / before[name] for before, now in pairs)
        print(
            f"| {name} | {before:.1f} | {now:.1f} | **{statistics.median(ratios):.3f}** | "
            f"{ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
