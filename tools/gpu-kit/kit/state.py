"""The state of the kit, in a file that a later call reads."""

import json
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
UNCHECKED = "BURN_MEGATRON_UNCHECKED_DEVICE"


class Kit:
    """The folders of a run, and the result of each step."""

    def __init__(self, program, work, out):
        self.program, self.bench = program, program.with_name("burn-megatron-bench")
        self.work, self.out = work, out
        self.results = work / "results"
        self.steps, self.device, self.stopped = {}, None, None
        self.opened, self.libraries = {}, None

    @classmethod
    def open(cls, fresh):
        work = os.environ.get("GPU_KIT_WORK")
        work = Path(work) if work else Path(tempfile.gettempdir()) / f"gpu-kit-{os.getuid()}"
        if fresh:
            shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        if work.stat().st_uid != os.getuid() or stat.S_ISLNK(work.lstat().st_mode):
            raise SystemExit(f"{work} belongs to another user: set GPU_KIT_WORK to another folder")
        out = Path(os.environ.get("OUT") or "gpu-kit-results").resolve()
        out.mkdir(parents=True, exist_ok=True)
        program = os.environ.get("GPU_KIT_PROGRAM") or HERE / "burn-megatron"
        kit = cls(Path(program).resolve(), work.resolve(), out)
        kit.results.mkdir(exist_ok=True)
        saved = kit.read_json(work / "state.json")
        if saved:
            kit.steps, kit.device, kit.opened = saved["steps"], saved["device"], saved["opened"]
        return kit

    @property
    def requested_unchecked(self):
        return os.environ.get(UNCHECKED) == "1"

    def record(self, step, result, reason="", **more):
        """Records the result of a step: passed, failed, `not run` or running."""
        self.steps[step.name] = {"result": result, "reason": reason, **more}
        if result != "running":
            say(f"   {result}{f': {reason}' if reason else ''}")
        self.save()

    def save(self):
        state = {"steps": self.steps, "device": self.device, "opened": self.opened}
        replace(self.work / "state.json", json.dumps(state, indent=1))

    def reason(self, name):
        return self.steps.get(name, {}).get("reason")

    def failed(self):
        return any(step["result"] == "failed" for step in self.steps.values())

    def wrong(self):
        """Returns why computing steps do not run (the failed check of check-gpu), or None."""
        return None if self.requested_unchecked else self.device

    def mark(self):
        """Returns the mark for tables if the device did not pass check-gpu. Checks of collectives do not count."""
        checks = (self.read_json(self.results / "check-gpu.json") or {}).get("checks", [])
        failed = {check.get("name") for check in checks if check.get("verdict") not in ("pass", "not run")}
        passed = self.steps.get("check-gpu", {}).get("result") == "passed"
        passed = passed or (checks and failed and failed <= {"nccl", "all-devices"})
        return "" if passed and not self.requested_unchecked else " — unchecked"

    @staticmethod
    def read_json(path):
        """Returns the content of a file, or None if it is missing or incomplete because its program was killed."""
        try:
            return json.loads(Path(path).read_text())
        except (OSError, ValueError):
            return None


def say(text):
    """Prints a line. The kit continues even if stdout is closed."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")


def replace(path, text):
    """Writes a file atomically, so that a reader never finds an incomplete file."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)
