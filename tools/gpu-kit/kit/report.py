"""Writes the report and the archive."""

import csv
import os
import statistics
import tarfile
import time

from plan import STEPS
from state import HERE, replace, say

ARCHIVE = "gpu-kit-results.tar.gz"
ARCHIVE_BYTES = 15 << 20


def renew(kit):
    """Writes the report and the archive again. If the output of a step is unreadable, only its table is missing."""
    parts = [header, steps, libraries, failures, checks, step_table, host_table, products, traced, kernel_table, torch_table]
    text = ""
    for part in parts:
        try:
            text += "".join(f"{line}\n" for line in part(kit))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            text += f"\n({part.__name__}: unreadable: {type(error).__name__}: {error})\n"
    replace(kit.results / "report.md", text)
    replace(kit.out / "report.md", text)
    pack(kit)


def pack(kit):
    """Packs the results. Leaves out the largest files if the archive is too large."""
    files = sorted((file for file in kit.results.iterdir() if file.is_file()), key=lambda file: file.stat().st_size)
    part = kit.out / f"{ARCHIVE}.part"
    while True:
        with tarfile.open(part, "w:gz") as archive:
            for file in files:
                archive.add(file, f"gpu-kit-results/{file.name}")
        if part.stat().st_size <= ARCHIVE_BYTES or len(files) == 1:
            break
        say(f"left out of the archive, which is too large: {files.pop().name}")
    os.replace(part, kit.out / ARCHIVE)


def header(kit):
    build = kit.read_json(HERE / "kit.json") or {}
    yield "# burn-megatron on a GPU"
    yield ""
    yield f"Kit: commit {build.get('commit', 'unknown')}. Written {time.strftime('%Y-%m-%d %H:%M:%S %Z')}."
    if kit.stopped:
        yield f"**The kit was stopped by {kit.stopped}.**"
    if kit.mark():
        yield ""
        yield "**The device did not pass `check-gpu`: every table is marked `unchecked`.**"


def steps(kit):
    samples = read_samples(kit)
    yield f"\n## Steps{kit.mark()}\n"
    yield "| call | step | result | s | GPU MiB | SM MHz | W | tells |"
    yield "|---|---|---|---|---|---|---|---|"
    for step in STEPS:
        state = kit.steps.get(step.name, {"result": "not yet", "reason": ""})
        result = state["result"] + (f": {cell(state['reason'])}" if state["reason"] else "")
        start, end = state.get("started"), state.get("ended")
        seconds = f"{end - start:.1f}" if start and end else "-"
        measured = [figures for at, figures in samples if start and end and start <= at <= end]
        figures = [largest(column) for column in zip(*measured)] or ["-"] * 3
        yield f"| {step.call} | {step.name} | {result} | {seconds} | {' | '.join(figures)} | {step.tells} |"


def read_samples(kit):
    """Returns the memory, clock and power of each second."""
    samples = []
    try:
        with open(kit.results / "smi.csv", newline="") as file:
            for row in csv.reader(file, skipinitialspace=True):
                try:
                    at = time.mktime(time.strptime(row[0].split(".")[0], "%Y/%m/%d %H:%M:%S"))
                    samples.append((at, [number(row[6]), number(row[2]), number(row[4])]))
                except (IndexError, ValueError):
                    continue  # A header or a truncated line.
    except OSError:
        pass
    return samples


def number(text):
    return float(text.split()[0]) if text[:1].isdigit() else None


def largest(column):
    numbers = [value for value in column if value is not None]
    return f"{max(numbers):.0f}" if numbers else "-"


def libraries(kit):
    yield "\n## Libraries\n"
    yield from kit.libraries.lines()
    yield "\nOpened by the program:\n" if kit.opened else "\nOpened by the program: none yet"
    for path, name in sorted(kit.opened.items()):
        yield f"- `{path}` (first in {name})"


def failures(kit):
    """Yields the end of the output of each failed step."""
    for name, state in kit.steps.items():
        if state["result"] != "failed":
            continue
        yield f"\n## Failed: {name}\n"
        yield "```text"
        for ending in ("out.txt", "err.txt"):
            yield from tail(kit.results / f"{name}.{ending}", 15)
        yield "```"


def tail(path, lines):
    try:
        return [line[:240] for line in path.read_text(errors="replace").splitlines()[-lines:]]
    except OSError:
        return []


def checks(kit):
    report = kit.read_json(kit.results / "check-gpu.json")
    if not report:
        return
    yield "\n## check-gpu\n"
    yield "| check | verdict | s | reason |"
    yield "|---|---|---|---|"
    for check in report["checks"]:
        seconds = check.get("seconds")
        seconds = f"{seconds:.1f}" if isinstance(seconds, (int, float)) else "-"
        yield f"| {check['name']} | {check['verdict']} | {seconds} | {cell(check.get('reason') or '')} |"


def step_table(kit):
    reports = [(name, kit.read_json(kit.results / f"{name}.json")) for name in kit.steps if name != "torch-124m"]
    reports = [(name, report) for name, report in reports if report and "warm_up" in report and "rows" in report]
    if not reports:
        return
    yield f"\n## Training steps{kit.mark()}\n"
    yield "| step | model | batch | attention | ms | from - to | tokens/s | TFLOP/s | MFU % | GiB of pools |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, report in reports:
        for row in report["rows"]:
            yield f"| {name} | {' | '.join(step_cells(row, report['peak_tflops']))} |"
        for row in report.get("failed", []):
            batch = f"{row['micro_batches']} x {row['micro_batch_size']}"
            yield f"| {name} | {row['name']} | {batch} | {row['attention']} | failed: {cell(row['reason'])} |"


def step_cells(row, peak):
    seconds = statistics.median(row["seconds"])
    tokens = row["micro_batch_size"] * row["micro_batches"] * row["sequence_length"]
    tflops = tokens / seconds * row["flops_per_token"] / 1e12
    return [
        row["name"],
        f"{row['micro_batches']} x {row['micro_batch_size']} x {row['sequence_length']}",
        row["attention"],
        f"{1e3 * seconds:.1f}",
        f"{1e3 * min(row['seconds']):.1f} - {1e3 * max(row['seconds']):.1f}",
        f"{tokens / seconds:.0f}",
        f"{tflops:.1f}",
        f"{100 * tflops / peak:.1f}" if peak else "-",
        f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "-",
    ]


def host_table(kit):
    if kit.read_json(kit.results / "host.json"):
        yield f"\n## Time of the host{kit.mark()}\n"
        yield from block(tail(kit.results / "host.out.txt", 20))


def products(kit):
    report = kit.read_json(kit.results / "gemm-tune.json")
    if not report:
        return
    yield f"\n## Products of cuBLASLt{kit.mark()}\n"
    yield "The 40 slowest; gemm-tune.json has all.\n"
    yield "| product | heuristic us | fastest us | candidate | of |"
    yield "|---|---|---|---|---|"
    products = sorted(report["products"].items(), key=lambda product: -product[1]["microseconds"][0])
    for name, chosen in products[:40]:
        times, candidate = chosen["microseconds"], chosen["candidate"]
        yield f"| {name} | {times[0]:.1f} | {times[candidate]:.1f} | {candidate} | {len(times)} |"


def traced(kit):
    lines = tail(kit.results / "trace-124m-64.tsv", 5000)
    if not lines:
        return
    yield f"\n## Kernels of a step, by the tracer{kit.mark()}\n"
    yield "ms, launches, mean us, grid, block, registers, shared bytes, local bytes, name; all of the run\n"
    yield from block(lines[:40] + [line for line in lines[40:] if line.startswith("#")])


def kernel_table(kit):
    report = kit.read_json(kit.results / "kernels.json")
    if not report:
        return
    yield f"\n## Kernels{kit.mark()}\n"
    yield f"{report['dtype']}; matrices: {cell(report['gemm_engine'])}; 8-bit matrices: {cell(report['fp8_engine'])}\n"
    yield "| kernel | direction | rows x width | us | GB/s | of copy | composed us |"
    yield "|---|---|---|---|---|---|---|"
    for row in report["rows"]:
        own, composed = row["fused_seconds"], row["composed_seconds"]
        name = f"{row['operation']} {row.get('engine') or ''}".strip()
        sizes = f"{row['rows']} x {row['width']}"
        rate, share = row["bytes"] / own / 1e9, row["copy_seconds"] / own
        plain = f"{1e6 * composed:.1f}" if composed else "-"
        yield f"| {name} | {row['direction']} | {sizes} | {1e6 * own:.1f} | {rate:.0f} | {share:.2f} | {plain} |"
    for failed in report.get("failed", []):
        yield f"| {cell(failed)} |"


def torch_table(kit):
    lines = tail(kit.results / "torch-124m.md", 100)
    if lines:
        yield f"\n## PyTorch{kit.mark()}\n"
        yield from lines


def block(lines):
    return ["```text", *lines, "```"]


def cell(text):
    """Returns a text as one line of a table cell."""
    return " ".join(str(text).replace("|", "/").split())[:400]
