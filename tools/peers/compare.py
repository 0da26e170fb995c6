"""Compares files that a script wrote with the committed files.

    python compare.py COMMITTED WRITTEN

Prints each difference, and exits with code 1 if there is one. Numbers may differ by rounding: numbers in JSON by 1e-6
relative to the committed number, floats in tensors by 1e-5 relative to the largest value of the committed tensor. Below
1, these limits are absolute. Everything else must be equal.
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file

# Files that are written by hand, not by a script.
BY_HAND = {".py", ".pyc"}

# Lists that `peft` writes from sets.
UNORDERED = ".target_modules"


def names(folder):
    """Returns the files of a folder, keyed by their paths relative to the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in BY_HAND)
    return {str(path.relative_to(folder)): path for path in files}


def json_difference(a, b, path=""):
    """Returns a description of the first difference between two values, or None."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = [(a[key], b[key], f"{path}.{key}") for key in a]
    elif path.endswith(UNORDERED) and isinstance(a, list) and isinstance(b, list):
        return None if sorted(a) == sorted(b) else f"{path}: {a} and {b}"
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b))]
    elif isinstance(a, float) and isinstance(b, (int, float)) and not isinstance(b, bool):
        return None if abs(a - b) <= 1e-6 * max(1.0, abs(a)) else f"{path}: {a} and {b}"
    else:
        return None if a == b and type(a) is type(b) else f"{path}: {str(a)[:60]} and {str(b)[:60]}"
    return next((found for pair in pairs if (found := json_difference(*pair))), None)


def tensor_difference(a, b):
    """Returns a description of the first difference between two dictionaries of tensors, or None."""
    if a.keys() != b.keys():
        return f"tensors {sorted(a.keys() ^ b.keys())}"
    for name, tensor in a.items():
        other = b[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return f"{name}: {tensor.dtype} {list(tensor.shape)} and {other.dtype} {list(other.shape)}"
        if tensor.is_floating_point() and tensor.numel():
            apart = (tensor.double() - other.double()).abs().max().item()
            if not apart <= 1e-5 * max(1.0, tensor.double().abs().max().item()):
                return f"{name}: {apart} apart"
        elif not torch.equal(tensor, other):
            return f"{name}: other values"
    return None


def difference(a, b):
    if a.read_bytes() == b.read_bytes():
        return None
    if a.suffix == ".safetensors":
        return tensor_difference(load_file(a), load_file(b))
    if a.suffix == ".json":
        return json_difference(json.loads(a.read_text()), json.loads(b.read_text()))
    return "other bytes"


def main():
    committed, written = (names(pathlib.Path(folder)) for folder in sys.argv[1:])
    found = [f"{name}: missing on one side" for name in sorted(committed.keys() ^ written.keys())]
    for name in sorted(committed.keys() & written.keys()):
        if reason := difference(committed[name], written[name]):
            found.append(f"{name}: {reason}")
    print("\n".join(found))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
