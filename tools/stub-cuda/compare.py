#!/usr/bin/env python3
"""Compares the host times of two programs on the stub. The programs run alternately.

    python3 tools/stub-cuda/compare.py OLD NEW [--rounds N] [-- FLAGS OF HOST]

Both programs are burn-megatron-bench, built in release mode with the feature `cuda`. The ratio of a subject is the median
over the rounds of the best tenth of NEW divided by the best tenth of OLD.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

HERE = pathlib.Path(__file__).parent


def settings(folder):
    """Builds the stub, and returns the environment for programs that use it."""
    printed = subprocess.run([HERE / "build.sh", folder], check=True, capture_output=True, text=True)
    stub = dict(setting.split("=", 1) for setting in printed.stdout.split())
    own = {"STUB_DEVICES": "2", "STUB_QUIET": "1", "BURN_MEGATRON_UNCHECKED_DEVICE": "1"}
    return {**os.environ, **own, **stub}


def best_tenths(program, flags, environment, folder):
    """Runs the benchmark, and returns the best tenth of each subject, in seconds."""
    out = pathlib.Path(folder, "host.json")
    command = [program, "--log-level", "warn", "host", "--json", out, *flags]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    rows = json.loads(out.read_text())["rows"]
    return {row["name"]: row["best_tenth_seconds"] for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = settings(folder)
        rounds = []
        for _ in range(args.rounds):
            measure = lambda program: best_tenths(program, args.flags, environment, folder)
            rounds.append((measure(args.old), measure(args.new)))
    for name in rounds[0][0]:
        old, new = ([1e3 * round[side][name] for round in rounds] for side in (0, 1))
        ratio = statistics.median(b / a for a, b in zip(old, new))
        print(f"{name}: {min(old):.3f} ms before, {min(new):.3f} ms now, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
