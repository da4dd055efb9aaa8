"""``python -m tests.cuda.replay FOLDER...``: runs recorded launches again, under a sanitizer.

Every array gets memory of its own, exactly as large as it is: what lies beyond is a sanitizer's.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import numpy as np

from tests.cuda.fibers import call, compiled


def replay(path: Path, launched: Mapping[str, AbstractSet[str]] | None = None) -> list[np.ndarray]:
    """Run one launch; the arrays that it was given, as it leaves them.

    Its file's instances are compiled, or those alone that are `launched`, by file: sanitizers make a compiler slow.
    """
    with np.load(path, allow_pickle=False) as content:
        name, instance = str(content["kernels"]), str(content["instance"])
        kernels = json.loads(path.with_name(f"{name}.json").read_text(encoding="utf-8"))
        arguments = [
            np.array(content[key]) if (key := f"argument {number}") in content else None
            for number in range(int(content["count"]))
        ]
        # Scalars are arrays without an axis.
        loaded = [argument if argument is None or argument.ndim else argument[()] for argument in arguments]
        instances = tuple(one for one in kernels["instances"] if launched is None or one in launched[name])
        function = compiled(name, kernels["source"], instances)[instance]
        call(function, content["grid"].tolist(), content["block"].tolist(), loaded, int(content["shared"]))
    return [argument for argument in arguments if argument is not None and argument.ndim]


if __name__ == "__main__":
    launches, launched = [], defaultdict(set)
    for path in (path for folder in sys.argv[1:] for path in sorted(Path(folder).glob("*.npz"))):
        with np.load(path) as content:
            launches.append((int(content["block"].prod()), path))
            launched[str(content["kernels"])].add(str(content["instance"]))
    # Small blocks first: ThreadSanitizer's clocks are as long as there were fibers so far.
    for _, path in sorted(launches):
        replay(path, launched)
    print("replayed", len(launches))
