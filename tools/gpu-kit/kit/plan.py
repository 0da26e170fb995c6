"""The steps, ordered by the information that they give per minute."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from runner import Failed, NotRun, reason_in
from state import HERE

STEPS = []
SMALL = ["--model", "124m", "--attention", "auto"]
RECIPE = ["--recipe", HERE / "recipes/gpt2-124m.toml"]
TINY = ["--model", "tiny", "--steps", "1", "--warm-up", "1"]


@dataclass(frozen=True)
class Step:
    """A step: its call, its limit in seconds, a description of its result, and whether it computes on the GPU."""

    name: str
    call: int
    limit: int
    tells: str
    work: Callable
    computes: bool


def step(name, call, limit, tells, computes=True):
    def add(work):
        STEPS.append(Step(name, call, limit, tells, work, computes))
        return work

    return add


@step("machine", 1, 45, "driver, GPU, CPUs, PyTorch", computes=False)
def machine(run):
    commands = [["nvidia-smi"], ["nvidia-smi", "-q"], ["nvidia-smi", "topo", "-m"], ["uname", "-a"], ["nproc"]]
    commands += [["cat", "/sys/fs/cgroup/cpu.max"], ["cat", "/etc/os-release"], ["nvcc", "--version"]]
    if run.kit.libraries.python:
        versions = "import torch; print('torch', torch.__version__, torch.version.cuda, torch.cuda.is_available())"
        commands.append([run.kit.libraries.python, "-c", versions])
    for command in commands:
        try:
            run.command(command)
        except (NotRun, Failed) as reason:
            with open(run.out, "a") as out:
                out.write(f"{reason}\n")
    run.program("env")


@step("check-gpu", 1, 180, "whether the libraries fit and the GPU computes right", computes=False)
def check_gpu(run):
    run.kit.device, file = None, run.file("json")
    file.unlink(missing_ok=True)
    try:
        run.program("check-gpu", "--json", file)
    except Failed as failed:
        report = run.kit.read_json(file)
        run.kit.device = obstacle(report) if report else run.kit.libraries.missing()
        then = f"the steps that compute {'do not run' if run.kit.wrong() else 'run unchecked'}"
        reasons = [f"{check.get('name')}: {check.get('reason')}" for check in failed_checks(report)]
        raise Failed(f"{'; '.join(reasons) or failed}; {then}") from None
    if not (run.kit.read_json(file) or {}).get("ok") and not run.kit.requested_unchecked:
        raise Failed("check-gpu ended with exit code 0, and its JSON is not ok; the steps that compute run unchecked")


def failed_checks(report):
    return [check for check in (report or {}).get("checks", []) if check.get("verdict") == "fail"]


def obstacle(report):
    """Returns why no computing step can give a correct result, or None. Other failed checks only mark the tables."""
    if report.get("obstacle"):
        return report["obstacle"]
    for check in failed_checks(report):
        name, reason = str(check.get("name")), str(check.get("reason"))
        if "wrong" in reason.lower() or name.startswith("first"):
            return "device gives wrong results"
        if not any(other.get("verdict") == "pass" for other in report["checks"]):
            return f"check-gpu failed: {name}: {reason}"
    return None


@step("step-124m-16", 1, 90, "the first tokens per second; which attention")
def first(run):
    run.steps(*SMALL, "--micro-batch-size", "16")


@step("trace-124m-64", 1, 110, "the time of each kernel, and gaps between kernels")
def trace(run):
    library = tracer(run)
    env = {"CUDA_INJECTION64_PATH": str(library), "TRACE_OUT": str(run.file("tsv"))}
    run.file("tsv").unlink(missing_ok=True)
    run.steps(*SMALL, "--micro-batch-size", "64", "--steps", "3", "--warm-up", "2", env=env)
    if not run.file("tsv").is_file():
        raise Failed("the driver did not load the tracer")


def tracer(run):
    """Compiles the tracer against the CUPTI of this machine."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise NotRun("there is no C compiler")
    cupti, _ = run.kit.libraries.chosen.get("cupti", (None, None))
    if cupti is None:
        raise NotRun("libcupti was not found")
    folder = Path(os.path.realpath(cupti)).parent
    includes = [run.kit.work / "cuda/include", folder.parent / "include", folder.parent.parent / "include"]
    includes += [folder.parent.parent.parent / "include", "/usr/local/cuda/include"]
    flags = [f"-I{include}" for include in includes if Path(include).is_dir()]
    library = run.kit.work / "libtrace.so"
    command = [compiler, "-O2", "-shared", "-fPIC", HERE / "cupti_trace.c", "-o", library, *flags, cupti]
    try:
        run.command([*command, f"-Wl,-rpath,{folder}"])
    except Failed as failed:
        raise NotRun(f"the tracer does not compile: {failed}") from None
    return library


@step("step-124m", 1, 120, "how the speed grows with the batch; memory")
def sizes(run):
    run.steps(*SMALL, "--micro-batch-size", "64,4,32,96")


@step("gemm-tune", 1, 90, "the heuristic of cuBLASLt against the fastest algorithm")
def tune(run):
    small = ["16384x768x2304", "16384x768x768", "16384x768x3072", "16384x3072x768", "16384x768x50304"]
    large = ["8192x1600x4800", "8192x1600x1600", "8192x1600x6400", "8192x6400x1600", "8192x1600x50304"]
    sizes = ["--sizes", ",".join(small + large), "--repeats", "5"]
    run.bench("gemm", "--tune", run.file("json"), "--device", "cuda", *sizes)


def fp8(recipe):
    @step(f"fp8-{recipe}", 1, 75, f"the speed in FP8, recipe {recipe}")
    def work(run):
        env = {"CUBLASLT_LOG_LEVEL": "2"}
        run.steps(*RECIPE, "--set", f'fp8.recipe="{recipe}"', env=env)


for name in ("delayed", "current", "blockwise"):
    fp8(name)


@step("cuda-graph", 1, 60, "the share of the host at 4 samples")
def graph(run):
    run.steps(*RECIPE, "--set", "train.cuda_graph=true", "--micro-batch-size", "4")


@step("torch-124m", 2, 210, "PyTorch on the same steps, eager and compiled")
def torch(run):
    python = run.kit.libraries.python
    if python is None:
        raise NotRun("no Python of this machine has torch")
    reports = [run.kit.read_json(run.kit.results / f"{name}.json") for name in ("step-124m-16", "step-124m")]
    reports = [report for report in reports if report]
    rows = [row for report in reports for row in report["rows"] if row["micro_batch_size"] in (16, 64)]
    if not rows:
        raise NotRun("the steps of burn-megatron before it have no rows")
    run.file("json").write_text(json.dumps({**reports[0], "rows": rows}))
    run.command([python, HERE / "torch_step.py", run.file("json"), "--device", "cuda", "--markdown", run.file("md")])
    lines = [line for line in run.file("md").read_text().splitlines() if line.startswith("| ")]
    if all(line.endswith("| - |") for line in lines[1:]):
        raise Failed(f"PyTorch timed no step: {reason_in(run.err)}")


@step("losses", 2, 100, "whether a small Llama trains as on the CPU, in f32 within 1e-4")
def losses(run):
    found = {}
    for device in ("cuda", "cpu"):
        folder = run.kit.work / f"losses-{device}"
        shutil.rmtree(folder, ignore_errors=True)
        recipe = ["--recipe", HERE / "recipes/small-llama.toml", "--data", HERE / "kit", "--extensions", "py"]
        run.program("pretrain", *recipe, "--device", device, "--run-dir", folder)
        if not (folder / "metrics.jsonl").is_file():
            raise Failed(f"pretrain --device {device} wrote no metrics")
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        found[device] = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    with open(run.out, "a") as out:
        out.write(f"{json.dumps(found)}\n")
    pairs = list(zip(found["cuda"], found["cpu"]))
    if not pairs or len(found["cuda"]) != len(found["cpu"]):
        raise Failed(f"the GPU trained {len(found['cuda'])} steps, the CPU {len(found['cpu'])}")
    # A loss that is not finite is written as null.
    if not all(gpu and cpu and abs(gpu - cpu) <= 1e-4 * abs(cpu) for gpu, cpu in pairs):
        raise Failed(f"the losses differ: {found['cuda']} on the GPU, {found['cpu']} on the CPU")


@step("step-1.5b", 2, 180, "a large model: memory and share of the peak")
def large(run):
    run.steps("--model", "1.5b", "--micro-batch-size", "8,16", "--steps", "4", "--warm-up", "2")


def sanitizer(tool):
    @step(tool, 2, 100, f"compute-sanitizer {tool} on one step of a small model")
    def work(run):
        program = found("compute-sanitizer")
        run.steps(*TINY, prefix=[program, "--tool", tool, "--error-exitcode", "9"])


sanitizer("memcheck")
sanitizer("racecheck")


@step("host", 2, 60, "the time of the host for a micro-batch")
def host(run):
    needs(run, "host")
    arguments = ["--device", "cuda", "--only", "model,fp8", "--repeats", "20", "--warm-up", "5"]
    run.bench("host", *arguments, "--json", run.file("json"))


@step("ncu", 3, 150, "what limits attention and the norms")
def ncu(run):
    kernels = "regex:mma_forward|mma_queries|mma_keys|norm_backward"
    # The skipped launches are the check of `mma` and the forward pass of the first layers.
    some = ["--launch-skip", "14", "--launch-count", "10"]
    options = ["--set", "full", "--kernel-name", kernels, *some, "--csv", "--page", "details"]
    small = ["--model", "124m", "--micro-batch-size", "16", "--steps", "1", "--warm-up", "1"]
    run.steps(*small, prefix=[found("ncu"), *options])


@step("kernels", 3, 200, "each kernel against a copy of the same bytes; attention by engine")
def kernels(run):
    names = "layer-norm,rms-norm,bias-gelu-tanh,cross-entropy,causal-attention,rope,adamw,linear,weight-gradient"
    options = ["--dtype", "bf16", "--only", names, "--attention", "auto,portable"]
    sizes = ["--sizes", "4096x1024,8192x4096,65536x768", "--warm-up-ms", "50", "--repeats", "10"]
    run.bench("kernels", "--device", "cuda", *options, *sizes, "--json", run.file("json"))


@step("nccl", 3, 60, "collectives over NCCL on one rank")
def nccl(run):
    launch = ["launch", "--ranks", "1", "--engine", "nccl", "conformance", "--engine", "nccl"]
    run.program(*launch, "--programs", "50")


@step("fusion", 3, 60, "GELU as an epilogue of products")
def fusion(run):
    run.steps(*RECIPE, "--kernels", "epilogue_fusion=true", "--micro-batch-size", "64")


@step("tuned", 3, 60, "the algorithms of gemm-tune in training")
def tuned(run):
    algorithms = run.kit.results / "gemm-tune.json"
    if not algorithms.is_file():
        raise NotRun("gemm-tune wrote no algorithms")
    run.steps(*SMALL, "--kernels", f"gemm_algorithms={algorithms}", "--micro-batch-size", "64")


@step("tests", 3, 240, "the test binaries of the kit")
def tests(run):
    binaries = sorted((HERE / "tests").glob("*")) if (HERE / "tests").is_dir() else []
    if not binaries:
        raise NotRun("this kit has no test binaries")
    # All binaries run, and then the step fails if one of them failed.
    failures, env = [], {**run.kit.libraries.environment(), "BURN_MEGATRON_TEST_CUDA": "1", "INSTA_UPDATE": "no"}
    for binary in binaries:
        try:
            run.command([binary, "--test-threads", "1"], env)
        except Failed as failed:
            failures.append(f"{binary.name}: {failed}")
    if failures:
        raise Failed("; ".join(failures))


def found(tool):
    """Returns the path of a tool of the CUDA toolkit."""
    path = shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin:/opt/cuda/bin")
    if path is None:
        raise NotRun(f"{tool} was not found")
    return path


def needs(run, *command):
    """Checks that burn-megatron-bench has a command."""
    asked = [run.kit.bench, *command, "--help"]
    try:
        done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        raise NotRun(f"{run.kit.bench} could not start") from None
    if done.returncode != 0:
        raise NotRun(f"this program has no `{' '.join(command)}`")
