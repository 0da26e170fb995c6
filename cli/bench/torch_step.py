#!/usr/bin/env python3
"""Times training steps of PyTorch on the models of a `bench step` run.

    burn-megatron bench step --device cuda --model 124m --micro-batch-size 16,64 --json step.json
    python3 torch_step.py step.json [--device cuda] [--markdown step.md]

Builds the GPT-2 of each row with random weights: PyTorch's scaled_dot_product_attention, f32 weights
under autocast to the type of the run, the fused AdamW where the device has it, clipping to norm 1,
eager and compiled; as nanoGPT does. Prints one table of all, in tokens per second. Run both on one
machine, one after the other. A model of another family keeps its row, with a dash. Needs torch.
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


def is_gpt2(model):
    """Whether this file's model is the one of a row."""
    plain = {
        "family": "gpt2",
        "norm": "layer",
        "activation": "gelu-tanh",
        "positions": "learned",
        "bias": True,
        "tied": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "label_smoothing": 0.0,
        "z_loss": 0.0,
    }
    absent = ["groups", "head_width", "mlp_width", "qkv_bias", "window"]
    same = all(model.get(key) == value for key, value in plain.items())
    return same and all(model.get(key) is None for key in absent) and not model.get("qk_norm")


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def time_steps(row, device, dtype, warm_up, compiled):
    """The median seconds of a step, and the most bytes that PyTorch's pools held."""
    torch.manual_seed(1)
    model = GPT2(row["model"]).to(device)
    fused = {"fused": True} if device == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), **fused)
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

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(warm_up):
        step()
    times = []
    for _ in row["seconds"]:
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_reserved() if device == "cuda" else None
    return statistics.median(times), peak


def time_row(row, device, dtype, warm_up, known):
    """By form: seconds and bytes. Rows that differ in their attention alone share one result."""
    key = json.dumps([row[part] for part in ("model", "micro_batch_size", "micro_batches")])
    if key in known:
        return known[key]
    results = {}
    if is_gpt2(row["model"]):
        for form in ("eager", "compiled"):
            torch._dynamo.reset()
            try:
                results[form] = time_steps(row, device, dtype, warm_up, form == "compiled")
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", help="the JSON file of `burn-megatron bench step --json`")
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
