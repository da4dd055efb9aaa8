"""``python -m tests.cuda.replay FOLDER SOURCES``: runs recorded launches again, under a sanitizer.

Every array gets memory of its own, exactly as large as it is: what lies beyond is a sanitizer's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tests.cuda.fibers import call, compiled


def main(folder: Path, sources: Path) -> None:
    files = json.loads(sources.read_text())
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as content:
            file, instance = files[str(content["source"])], str(content["instance"])
            arguments = [
                np.array(content[name]) if (name := f"argument {number}") in content else None
                for number in range(int(content["count"]))
            ]
            # Scalars are arrays without an axis.
            given = [argument if argument is None or argument.ndim else argument[()] for argument in arguments]
            function = compiled(file["name"], file["source"], tuple(file["instances"]))[instance]
            call(function, content["grid"].tolist(), content["block"].tolist(), given, int(content["shared"]))
    print("replayed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
