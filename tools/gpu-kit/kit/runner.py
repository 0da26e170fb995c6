"""Runs commands with time limits, and samples the GPU meanwhile."""

import ctypes
import os
import re
import signal
import subprocess
import time

from state import say

# Longer outputs are cut in the middle.
OUTPUT_BYTES = 1 << 20
LIBRARY = re.compile(r"/\S*lib(cuda|nvrtc|cublas|nccl|cupti|cudart)[^/\s]*\.so[^/\s]*$")
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """A signal asked the kit to end."""


class NotRun(Exception):
    """A step cannot run on this machine."""


class Failed(Exception):
    """A step failed or found an error."""


def die_with_kit():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_step(kit, step, left, begun):
    """Runs one step and records its result. `left` is the time left in this call. `begun` is called at the start."""
    limit = limits().get(step.name, step.limit)
    limit = limit if left is None else min(limit, left)
    say(f"== {step.name} (at most {limit:.0f} s)")
    if step.computes and kit.wrong():
        kit.record(step, "not run", kit.wrong())
        return
    started = time.time()
    kit.record(step, "running", started=started)
    begun()
    runner = Runner(kit, step.name, limit)
    try:
        step.work(runner)
        result, reason = "passed", ""
    except NotRun as error:
        result, reason = "not run", str(error)
    except Failed as error:
        result, reason = "failed", str(error)
    except Stopped as error:
        kit.record(step, "failed", f"the kit was stopped by {error}", **runner.times(started))
        raise
    except Exception as error:  # A bug in the kit must not stop the next steps.
        result, reason = "failed", f"the kit: {type(error).__name__}: {error}"
    kit.record(step, result, reason, **runner.times(started))


def limits():
    """Returns the limits in GPU_KIT_LIMITS, for example `step-124m=300,kernels=600`."""
    pairs = [pair.partition("=") for pair in os.environ.get("GPU_KIT_LIMITS", "").split(",") if pair]
    try:
        return {name: float(seconds) for name, _, seconds in pairs}
    except ValueError:
        raise SystemExit("invalid GPU_KIT_LIMITS: expected STEP=SECONDS,..") from None


class Runner:
    """Runs the commands of one step, which share a time limit and output files."""

    def __init__(self, kit, name, limit):
        self.kit, self.name, self.limit = kit, name, limit
        self.end = time.monotonic() + limit
        self.out, self.err = (kit.results / f"{name}.{end}" for end in ("out.txt", "err.txt"))
        self.out.unlink(missing_ok=True)
        self.err.unlink(missing_ok=True)

    def times(self, started):
        return {"started": started, "ended": time.time()}

    def file(self, ending):
        """Returns the path of a result file of this step."""
        return self.kit.results / f"{self.name}.{ending}"

    def program(self, *arguments, **options):
        """Runs burn-megatron with the chosen libraries."""
        self.chosen(self.kit.program, arguments, **options)

    def bench(self, *arguments, **options):
        """Runs burn-megatron-bench with the chosen libraries."""
        self.chosen(self.kit.bench, arguments, **options)

    def chosen(self, program, arguments, env=None, prefix=()):
        env = {**self.kit.libraries.environment(), **(env or {})}
        self.command([*prefix, program, "--log-level", "warn", *arguments], env)

    def steps(self, *arguments, **options):
        """Runs `burn-megatron-bench step` on the GPU. Its JSON file is one of the results."""
        arguments = ["--device", "cuda", "--json", self.file("json"), *arguments]
        try:
            self.bench("step", *arguments, **options)
        except Failed as failed:
            report = self.kit.read_json(self.file("json")) or {}
            reasons = [row["reason"] for row in report.get("failed", [])]
            raise Failed("; ".join(reasons) or str(failed)) from None

    def command(self, command, env=None):
        """Runs a command until it ends or the step reaches its limit. Raises `Failed` unless the exit code is 0."""
        command = [str(word) for word in command]
        environment = {**os.environ, **(env or {})}
        try:
            with open(self.out, "ab") as out, open(self.err, "ab") as err:
                out.write(f"$ {' '.join(command)}\n".encode())
                out.flush()
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=environment,
                    cwd=self.kit.work,
                    start_new_session=True,
                    preexec_fn=die_with_kit,
                )
        except OSError as error:
            raise NotRun(f"{command[0]} could not start: {error.strerror}") from None
        try:
            code = self.wait(process)
        finally:
            kill(process)
            cut(self.out)
            cut(self.err)
        if code is None:
            after = f" after a panic: {reason_in(self.err)}" if self.panicked() else ""
            raise Failed(f"killed at its limit of {self.limit:.0f} s{after}")
        if code != 0:
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise Failed(f"{ended}: {reason_in(self.err) or reason_in(self.out)}")
        if self.panicked():
            raise Failed(f"exit code 0 after a panic: {reason_in(self.err)}")

    def panicked(self):
        """Returns whether a thread panicked. A device thread that panics leaves memory unwritten."""
        return b"panicked at" in self.err.read_bytes()

    def wait(self, process):
        """Returns the exit code, or `None` at the limit. Records which NVIDIA libraries the process has mapped."""
        while time.monotonic() < self.end:
            if process.poll() is not None:
                return process.returncode
            self.note_libraries(process.pid)
            time.sleep(0.05)
        return None

    def note_libraries(self, pid):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                found = {match.group(0) for match in map(LIBRARY.search, maps) if match}
        except OSError:
            return
        for path in found:
            self.kit.opened.setdefault(os.path.realpath(path), self.name)


def kill(process):
    """Ends a command and its children, first with SIGTERM, then with SIGKILL."""
    for number, seconds in ((signal.SIGTERM, 2), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.poll()


def cut(path):
    """Cuts the middle out of a long output."""
    size = path.stat().st_size
    if size <= OUTPUT_BYTES:
        return
    with open(path, "rb") as file:
        first = file.read(OUTPUT_BYTES // 4)
        file.seek(size - OUTPUT_BYTES // 2)
        last = file.read()
    between = f"\n[.. {size - len(first) - len(last)} bytes were left out ..]\n".encode()
    path.write_bytes(first + between + last)


def reason_in(path):
    """Returns the last error line of an output, or its last line if there is no error."""
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    lines = [line for line in lines if not line.startswith("$ ")]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or [""])[-1][:300]


class Sampler:
    """Runs nvidia-smi, which writes a line each second until the kit ends."""

    QUERY = "timestamp,index,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used,utilization.gpu"

    def __init__(self, kit):
        command = ["nvidia-smi", f"--query-gpu={self.QUERY}", "--format=csv", "-l", "1"]
        try:
            with open(kit.results / "smi.csv", "ab") as file:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_kit,
                )
        except OSError:
            self.process = None

    def stop(self):
        if self.process:
            kill(self.process)
