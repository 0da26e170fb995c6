"""Measures burn-megatron on the NVIDIA GPU of this machine, step by step.

    bash gpu-kit.sh            all steps
    bash gpu-kit.sh 1          the steps of call 1, in less than 10 minutes; then 2 and 3

Each step has a time limit. The report (report.md) and the archive (gpu-kit-results.tar.gz) are updated
after each step, so they contain the finished steps even if the kit is killed. Both are written to the
folder OUT. The default is gpu-kit-results in the current folder.

Variables:
    OUT                                folder for the report and the archive
    PYTHON                             Python with torch and NVIDIA's libraries
    GPU_KIT_PROGRAM                    path to burn-megatron, built for CUDA, with burn-megatron-bench next to it
                                       (default: the programs of the kit)
    GPU_KIT_WORK                       folder that keeps the steps between calls
    GPU_KIT_LIMITS                     time limits of steps in seconds, for example step-124m=300,kernels=600
    BURN_MEGATRON_UNCHECKED_DEVICE=1   run all steps although check-gpu failed, and mark the tables
"""

import argparse
import signal
import sys
import time

from libraries import Libraries
from plan import STEPS
from report import renew
from runner import Sampler, Stopped, limits, run_step
from state import Kit, say

# Seconds of a call. The archive is complete before a machine that limits commands to 10 minutes ends the call.
CALL_SECONDS = 560
LEAST_SECONDS = 10


def stop(number, _frame):
    raise Stopped(signal.Signals(number).name)


def main():
    parser = argparse.ArgumentParser(
        prog="gpu-kit.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", nargs="?", type=int, choices=[1, 2, 3])
    call = parser.parse_args().call
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    limits()
    kit = Kit.open(fresh=call in (None, 1))
    kit.libraries = Libraries.find(kit)
    sampler = Sampler(kit)
    end = None if call is None else time.monotonic() + CALL_SECONDS
    stopped = None
    try:
        renew(kit)
        for step in chosen(kit, call):
            left = None if end is None else end - time.monotonic()
            if left is not None and left < LEAST_SECONDS:
                kit.record(step, "not run", "no time was left in this call")
                continue
            run_step(kit, step, left, lambda: renew(kit))
            renew(kit)
    except Stopped as reason:
        stopped = str(reason)
    finally:
        sampler.stop()
        kit.stopped = stopped
        renew(kit)
    say(f"\nplease send {kit.out / 'gpu-kit-results.tar.gz'}")
    return 1 if stopped or kit.failed() else 0


def chosen(kit, call):
    """Returns the steps of a call. A later call first runs a missing check-gpu, and last the steps that had no time."""
    if call is None:
        return STEPS
    missing = [step for step in STEPS if step.name == "check-gpu" and step.name not in kit.steps]
    left = [
        step
        for step in STEPS
        if step.call < call and kit.reason(step.name) == "no time was left in this call"
    ]
    own = [step for step in STEPS if step.call == call]
    return [step for step in missing if step.call < call] + own + left


if __name__ == "__main__":
    sys.exit(main())
