"""Draw many cases, and print the faults by subject, features and kind: ``python -m tests.crossings.run --seed 1``."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict

import torch

from .draws import Verdict, drawn, judged, smallest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--refusals", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    faults: dict[tuple[str, ...], list[Verdict]] = defaultdict(list)
    refusals: dict[str, list[Verdict]] = defaultdict(list)
    for seed in range(arguments.seed, arguments.seed + arguments.draws):
        verdict = judged(drawn(seed, arguments.full))
        counts[verdict.kind] += 1
        if verdict.is_fault:
            small = smallest(verdict)
            print(f"{small.draw}: {small.kind}, {small.detail}", flush=True)
            faults[small.draw.subject, small.kind, *sorted(small.draw.features)].append(small)
        if verdict.kind == "refused":
            refusals[f"{verdict.draw.subject}: {verdict.detail}"].append(verdict)
    print(dict(counts))
    for group, verdicts in sorted(faults.items()):
        print(f"{len(verdicts)} × {' | '.join(group)}")
    if arguments.refusals:
        for text, verdicts in sorted(refusals.items(), key=lambda item: -len(item[1])):
            print(f"{len(verdicts)} {text}\n    {verdicts[0].draw}")


if __name__ == "__main__":
    main()
