"""The engine alone, on random weights of a published model's true shape.

    python -m bench.offline qwen3-0.6b [--device cuda] [--out bench/results/h200.jsonl] [--quick]

The measurements, and their definitions, are those of `gapless bench offline`, which takes any model
(`engine_core/measure.py`).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench.shapes import SHAPES, write_config
from engine_core.measure import measure, parser


def main() -> None:
    arguments = argparse.ArgumentParser(
        parents=[parser()], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("model", choices=sorted(SHAPES))
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as root:
        measure(given.model, str(write_config(given.model, Path(root))), given, dummy=True)


if __name__ == "__main__":
    main()
