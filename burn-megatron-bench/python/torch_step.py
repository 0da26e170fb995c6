#!/usr/bin/env python3
"""Times training steps of PyTorch on the models of a `burn-megatron-bench step` run.

    burn-megatron-bench step --device cuda --model 124m --micro-batch-size 16,64 --json step.json
    python3 torch_step.py step.json [--device cuda] [--markdown step.md]

Builds the GPT-2 or Llama of each row with random weights, eager and compiled. As in nanoGPT, the model uses
PyTorch's scaled_dot_product_attention, f32 weights with autocast to the type of the run, the fused AdamW,
and clipping to norm 1. Prints one table in tokens per second. Run both programs on the same machine, one
after the other. The table has a dash for models of other families. Needs torch.

`burn-megatron-bench step --python PYTHON` starts this script with its settings. The benchmark alternates between its
own steps and the eager steps of this script, one row at a time.
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, seq, hidden = x.shape
        split = lambda part: part.view(batch, seq, self.heads, -1).transpose(1, 2)
        q, k, v = map(split, self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, model):
        super().__init__()
        hidden, vocabulary = model["hidden"], model["vocabulary"]
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(model["context"], hidden)
        self.blocks = nn.Sequential(
            *[Block(hidden, model["heads"]) for _ in range(model["layers"])]
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens, targets):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class LlamaBlock(nn.Module):
    def __init__(self, hidden, heads, groups, width):
        super().__init__()
        self.heads, self.groups = heads, groups
        head = hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden, 1e-5), nn.RMSNorm(hidden, 1e-5)
        self.qkv = nn.Linear(hidden, (heads + 2 * groups) * head, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x, cos, sin):
        batch, seq, hidden = x.shape
        head = hidden // self.heads
        parts = [self.heads * head, self.groups * head, self.groups * head]
        split = lambda part: part.view(batch, seq, -1, head).transpose(1, 2)
        q, k, v = map(split, self.qkv(self.norm1(x)).split(parts, dim=-1))

        def rotated(x):
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-second, first), dim=-1) * sin

        grouped = {"enable_gqa": True} if self.groups != self.heads else {}
        attended = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, **grouped
        )
        x = x + self.output(attended.transpose(1, 2).reshape(batch, seq, hidden))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, model):
        super().__init__()
        hidden, vocabulary, heads = model["hidden"], model["vocabulary"], model["heads"]
        self.tokens = nn.Embedding(vocabulary, hidden)
        width = model.get("mlp_width") or max(hidden * 8 // 3 // 64 * 64, 64)
        shape = (hidden, heads, model.get("groups") or heads, width)
        self.blocks = nn.ModuleList([LlamaBlock(*shape) for _ in range(model["layers"])])
        self.norm = nn.RMSNorm(hidden, 1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        half = hidden // heads // 2
        frequencies = model["positions"]["rotary"]["base"] ** (-torch.arange(half) / half)
        angles = torch.arange(model["context"])[:, None] * frequencies.repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, targets):
        x, seq = self.tokens(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# For each family: its class, and the settings that the model in this file implements.
KNOWN = {
    "gpt2": (
        GPT2,
        {"norm": "layer", "activation": "gelu-tanh", "positions": "learned", "bias": True, "tied": True},
    ),
    "llama": (Llama, {"norm": "rms", "activation": "swi-glu", "tied": True}),
}
# Settings that no class reads, or that only affect shapes.
IGNORED = ["family", "vocabulary", "context", "layers", "hidden", "heads", "vocabulary_divisible_by"]
IGNORED += ["init_std", "norm_epsilon", "scaled_output_init"]


def class_of(model):
    """Returns the class for the model of a row, or None if this file does not implement the model."""
    kind, settings = KNOWN.get(model.get("family"), (None, {}))
    rest = {key: value for key, value in model.items() if key not in IGNORED and key not in settings}
    if kind is Llama:
        rest.pop("groups", None)
        rest.pop("mlp_width", None)
        rotary = rest.pop("positions", {}).get("rotary", {})
        rest["scaling"] = rotary.get("scaling") != "none"
    same = all(model.get(key) == value for key, value in settings.items())
    return kind if same and not any(rest.values()) else None


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device):
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")


def peak_bytes(device):
    """Returns the peak of the memory pools on a GPU, or the peak resident memory of the process on Linux, or None."""
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    if sys.platform == "linux":
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["VmHWM"].split()[0]) * 1024
    return None


def time_steps(row, device, dtype, warm_up, compiled):
    """Returns the seconds of each step and the peak memory in bytes."""
    reset_peak(device)
    torch.manual_seed(1)
    model = class_of(row["model"])(row["model"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model, dynamic=False) if compiled else model
    shape = (row["micro_batch_size"], row["sequence_length"])
    narrow = dtype != torch.float32
    cast = torch.autocast(device, dtype) if narrow else contextlib.nullcontext()
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def step():
        for _ in range(row["micro_batches"]):
            tokens, targets = (
                torch.randint(row["model"]["vocabulary"], shape, device=device) for _ in range(2)
            )
            with cast:
                loss = forward(tokens, targets) / row["micro_batches"]
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(warm_up):
        step()
    times = []
    for _ in row["seconds"]:
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        times.append(time.perf_counter() - start)
    return times, peak_bytes(device)


def time_row(row, device, dtype, warm_up, known):
    """Returns median seconds and bytes, eager and compiled. Rows that only differ in attention share one result."""
    key = json.dumps([row[part] for part in ("model", "micro_batch_size", "micro_batches")])
    if key in known:
        return known[key]
    results = {}
    if class_of(row["model"]):
        for form in ("eager", "compiled"):
            torch._dynamo.reset()
            try:
                times, peak = time_steps(row, device, dtype, warm_up, form == "compiled")
                results[form] = statistics.median(times), peak
            except RuntimeError as error:
                first = str(error).strip().splitlines()[0]
                print(f"{row['name']}, {form}: {first}", file=sys.stderr)
    known[key] = results
    return results


def table(report, results):
    peak = report["peak_tflops"]
    lines = [
        f"{report['device']}, {report['precision']}, tokens per second (medians of steps)"
        f"{f' and share of {peak} TFLOP/s' if peak else ''}; torch {torch.__version__}",
        "",
        "| model | batch | attention | burn-megatron | GiB | torch eager | GiB | torch compiled | GiB "
        "| burn-megatron / fastest torch |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    gib = lambda size: "-" if size is None else f"{size / 2**30:.1f}"
    for row, forms in zip(report["rows"], results):
        tokens = row["micro_batch_size"] * row["micro_batches"] * row["sequence_length"]

        def speed(seconds):
            share = f" ({100 * tokens / seconds * row['flops_per_token'] / 1e12 / peak:.1f} %)" if peak else ""
            return f"{tokens / seconds:.0f}{share}"

        own = statistics.median(row["seconds"])
        cells = []
        for form in ("eager", "compiled"):
            seconds, size = forms.get(form, (math.nan, None))
            cells += ["-" if math.isnan(seconds) else speed(seconds), gib(size)]
        best = min((seconds for seconds, _ in forms.values()), default=math.nan)
        ratio = "-" if math.isnan(best) else f"{best / own:.2f}"
        batch = f"{row['micro_batches']} x {row['micro_batch_size']} x {row['sequence_length']}"
        lines.append(
            f"| {row['name']} | {batch} | {row['attention']} | {speed(own)} "
            f"| {gib(row['peak_bytes'])} | {' | '.join(cells)} | {ratio} |"
        )
    return "\n".join(lines)


def serve(settings):
    """Reads rows, one per line. Prints step times and peak memory for each, or null for an unknown model."""
    torch.set_num_threads(settings["threads"])
    print(f"ready torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        row, answer = json.loads(line), None
        if class_of(row["model"]):
            dtype, device = DTYPES[settings["precision"]], settings["device"]
            times, peak = time_steps(row, device, dtype, settings["warm_up"], False)
            answer = {"seconds": times, "peak_bytes": peak}
        print(json.dumps(answer), flush=True)


def main():
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        return serve(json.loads(sys.argv[1]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", help="the JSON file of `burn-megatron-bench step --json`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--markdown", help="where the table goes besides the terminal")
    args = parser.parse_args()
    with open(args.report) as file:
        report = json.load(file)
    torch.set_float32_matmul_precision("high")
    dtype, known = DTYPES[report["precision"]], {}
    results = [
        time_row(row, args.device, dtype, report["warm_up"], known) for row in report["rows"]
    ]
    text = table(report, results)
    print(text)
    if args.markdown:
        with open(args.markdown, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
