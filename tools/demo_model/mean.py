"""Writes the mean of two models: a stage that adds tasks costs less of what was known before if it is taken in part.

python tools/demo_model/mean.py BEFORE AFTER --share 0.6 --out FOLDER
"""

import argparse
from pathlib import Path

import torch
from export import load_model, save_model
from tokenizers import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--share", type=float, default=0.6, help="of the weights after it (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    before, after = load_model(options.before), load_model(options.after)
    with torch.no_grad():
        for mean, old in zip(after.parameters(), before.parameters(), strict=True):
            mean.lerp_(old, 1 - options.share)
    save_model(after, Tokenizer.from_file(str(options.after / "tokenizer.json")), options.out)


if __name__ == "__main__":
    main()
