"""A sampler of one's own: any function from logits and ids to the next id.

    python examples/custom_sampler.py MODEL [PROMPT]

Every request takes `sampler=` in the place of the built-in choice. Nothing about plans changes: choosing a token
happens outside the model, so a sampler can be as odd as it likes and the held plan stays.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

import fuel_core as fuel
from fuel_core.generation import distribution, sample


class Typical:
    """Locally typical sampling (Meister et al. 2022, arXiv 2202.00666), without repeating a pair of tokens.

    Kept are the ids whose surprise, -log p, is nearest to what the distribution makes one expect, until they hold
    `mass`. An id that has followed the newest one before is banned: no two tokens ever come twice in the same order.
    """

    def __init__(self, mass: float = 0.9, temperature: float = 0.7, seed: int = 0) -> None:
        self.mass = mass
        self.params = fuel.SamplingParams(temperature=temperature)
        self.generator = torch.Generator().manual_seed(seed)  # its own, so that nothing else moves it

    def __call__(self, logits: Tensor, token_ids: Sequence[int]) -> int:
        """Logits `[vocab]`, float32, and all ids so far (prompt included) -> the next id."""
        # The built-in steps can be used as parts; this one checks for NaN as well. float64, sums to 1.
        p = distribution(logits, self.params, token_ids)
        banned = [after for before, after in pairwise(token_ids) if before == token_ids[-1]]
        if len(set(banned)) < p.numel():
            p[banned] = 0.0
            p /= p.sum()
        surprise = -p.clamp_min(1e-300).log()
        expected = (p * surprise).sum()
        order = (surprise - expected).abs().argsort(stable=True)
        before = p[order].cumsum(0) - p[order]  # mass in front of each id
        kept = torch.zeros_like(p)
        kept[order[before < self.mass]] = p[order[before < self.mass]]
        return sample(kept / kept.sum(), self.generator)


def main(path: str, prompt: str = "Once upon a time") -> None:
    with fuel.load(path, plan="recorded") as llm:
        for seed in (1, 2):
            done = llm.generate(prompt, max_new_tokens=24, sampler=Typical(seed=seed))
            print(f"seed {seed}: {done.text!r} ({done.finish_reason})")
        print(f"plans built {llm.stats.plans_built}, rebinds {llm.stats.rebinds}")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except fuel.FuelError as error:  # one line: expected, found, next step
        sys.exit(str(error))
