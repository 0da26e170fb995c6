#!/usr/bin/env python3
"""Times PyTorch (eager and compiled) and Triton on the sizes of a `burn-megatron-bench kernels` run.

    burn-megatron-bench kernels --device cuda --dtype bf16 --json kernels.json
    python3 torch_kernels.py kernels.json [--device cuda] [--markdown kernels.md]

Reads the rows of the JSON file, times the same operations at the same sizes and in the same type, and
prints one table in milliseconds. Run both programs on the same machine, one after the other.
The table has a dash for operations without a counterpart: products of 8-bit blocks, and operations
that this build of torch or this device does not support. The script prints the reason on stderr. Needs
torch. RMSNorm and the softmax also have Triton kernels (Triton comes with torch on CUDA).
"""

import argparse
import json
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
EPSILON = 1e-5


def rms_norm(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, EPSILON)


def add_rms_norm(x, residual, w):
    total = x + residual
    return rms_norm(total, w), total


def gated(activation):
    def apply(x):
        a, b = x.chunk(2, dim=-1)
        return activation(a) * b

    return apply


def rope(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def heads(width):
    """Returns the number of heads and their width: 64 if it divides the width, as in the Rust benchmark."""
    count = width // 64 if width % 64 == 0 else 1
    return count, width // count


def adamw(weight, first, second, gradient):
    first.lerp_(gradient, 1 - 0.9)
    second.mul_(0.95).addcmul_(gradient, gradient, value=1 - 0.95)
    weight.mul_(1 - 1e-3 * 0.1)
    weight.addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-3)
    return weight


def cases(row, device, dtype):
    """Returns the operation of a row, its inputs with gradients and its other inputs, or None."""
    rows, width = row["rows"], row["width"]

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, device=device, dtype=dtype)

    name = row["operation"]
    if name == "layer-norm":
        norm = lambda x, w, b: F.layer_norm(x, (width,), w, b, EPSILON)
        return norm, [draw(rows, width), draw(width), draw(width)], []
    if name == "rms-norm":
        return rms_norm, [draw(rows, width), draw(width)], []
    if name == "add-rms-norm":
        return add_rms_norm, [draw(rows, width), draw(rows, width), draw(width)], []
    if name == "gelu":
        return F.gelu, [draw(rows, width)], []
    if name == "gelu-tanh":
        return (lambda x: F.gelu(x, approximate="tanh")), [draw(rows, width)], []
    if name == "bias-gelu-tanh":
        biased = lambda x, b: F.gelu(x + b, approximate="tanh")
        return biased, [draw(rows, width), draw(width)], []
    if name == "squared-relu":
        return (lambda x: F.relu(x).square()), [draw(rows, width)], []
    if name == "swi-glu":
        return gated(F.silu), [draw(rows, 2 * width)], []
    if name == "ge-glu":
        return gated(lambda x: F.gelu(x, approximate="tanh")), [draw(rows, 2 * width)], []
    if name == "quick-ge-glu":
        return gated(lambda x: x * torch.sigmoid(1.702 * x)), [draw(rows, 2 * width)], []
    if name == "softmax":
        return (lambda x: torch.softmax(0.125 * x, dim=-1)), [draw(rows, width)], []
    if name == "cross-entropy":
        targets = torch.randint(width, (rows,), device=device)
        loss = lambda x, t: F.cross_entropy(x, t, reduction="none")
        return loss, [draw(rows, width)], [targets]
    if name == "bias-dropout-add":
        add = lambda x, r, b: r + F.dropout(x + b, 0.1)
        return add, [draw(rows, width), draw(rows, width), draw(width)], []
    if name == "rope":
        count, features = heads(width)
        angles = torch.outer(
            torch.arange(rows, device=device).float(),
            10000.0 ** (-torch.arange(0, features // 2, device=device) / (features // 2)),
        )
        cos, sin = (table.to(dtype)[None, :, None, :] for table in (angles.cos(), angles.sin()))
        return rope, [draw(1, rows, count, features // 2 * 2)], [cos, sin]
    if name == "causal-attention":
        count, features = heads(width)
        attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attend, [draw(1, count, rows, features) for _ in range(3)], []
    if name == "adamw":
        state = [draw(rows * width, dtype=torch.float32) for _ in range(4)]
        state[2].abs_()
        return adamw, [], state
    if name == "sum-of-squares":
        return (lambda x: x.float().square().sum()), [], [draw(rows * width)]
    if name == "linear":
        factors = [draw(rows, width), draw(width, width)]
        return (lambda x, w, b: torch.addmm(b, x, w)), [], factors + [draw(width)]
    if name == "weight-gradient":
        factors = [draw(rows, width) for _ in range(2)]
        into = draw(width, width, dtype=torch.float32)
        if dtype == torch.float32:
            return (lambda x, g, into: into.addmm_(x.t(), g)), [], factors + [into]
        # PyTorch cannot accumulate a product of 16-bit factors into an f32 sum.
        return (lambda x, g, into: into.add_(x.t().mm(g))), [], factors + [into]
    return None


FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def one_scale(x, scale, kind):
    """Returns the codes, their transpose, the largest magnitude and the factor that decodes the codes."""
    most = FP8_MAX[kind]
    codes = (x.float() * scale).clamp(-most, most).to(kind)
    return codes, codes.t().contiguous(), x.abs().max(), scale.reciprocal()


def current(x, kind):
    return one_scale(x, FP8_MAX[kind] / x.abs().max().float(), kind)


def of_blocks(x, height, width):
    """Returns the codes and the scales of blocks. Scales are rounded down to powers of two."""
    rows, depth = x.shape
    high, wide = -rows % height, -depth % width
    blocks = F.pad(x.float(), (0, wide, 0, high))
    blocks = blocks.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(448.0 / amax.clamp(min=1e-30))))
    codes = (blocks * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(2, 3).flatten(0, 1)[:rows, :depth], scale.reciprocal().flatten()


def both_ways(x, height, width):
    return of_blocks(x, height, width), of_blocks(x.t(), height, width)


def scaled_mm(a, b, scale_a, scale_b, dtype, fast=False):
    """Returns a b^T. Both factors are stored row by row."""
    kwargs = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": dtype}
    if fast and a.is_cuda:
        kwargs["use_fast_accum"] = True
    return torch._scaled_mm(a, b.t(), **kwargs)


def fp8_cases(row, device, dtype):
    """Returns the 8-bit operation of a row and its inputs, or None."""
    rows, width = row["rows"], row["width"]

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, device=device).to(dtype)

    one = torch.ones((), device=device)
    given = lambda x, kind: one_scale(x, one, kind)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    name = row["operation"]
    quantisers = {
        "quantize-delayed": lambda x: given(x, e4m3),
        "quantize-current": lambda x: current(x, e4m3),
        "quantize-blocks": lambda x: both_ways(x, 1, 128),
        "quantize-squares": lambda x: both_ways(x, 128, 128),
        "quantize-mx": lambda x: both_ways(x, 1, 32),
    }
    if name in quantisers:
        return quantisers[name], [draw(rows, width)]
    if name == "product-delayed":
        x8, x_turned = given(draw(rows, width), e4m3)[:2]
        w8, w_turned = given(draw(width, width), e4m3)[:2]
        g8, g_turned = given(draw(rows, width), e5m2)[:2]
        if row["direction"] == "forward":
            return (lambda x, w: scaled_mm(x, w, one, one, dtype, fast=True)), [x8, w_turned]

        def backward(g, w, x_turned, g_turned, sums):
            sums += scaled_mm(x_turned, g_turned, one, one, torch.float32)
            return scaled_mm(g, w, one, one, dtype)

        sums = draw(width, width, dtype=torch.float32)
        return backward, [g8, w8, x_turned, g_turned, sums]
    return None


def time_fp8(row, device, dtype, samples):
    case = fp8_cases(row, device, dtype)
    if case is None:
        return {}
    function, inputs = case
    times = {}
    torch._dynamo.reset()
    for form, run in [("eager", function), ("compiled", torch.compile(function, dynamic=False))]:
        try:
            with torch.no_grad():
                times[form] = median_ms(lambda: lambda: run(*inputs), device, samples)
        except (RuntimeError, NotImplementedError) as error:
            first = str(error).strip().splitlines()[0]
            print(f"{row['operation']}, {form}: {first}", file=sys.stderr)
    return times


def triton_kernels():
    """Returns Triton kernels, keyed by operation. They only cover the forward pass."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return {}

    @triton.jit
    def rms_kernel(x, w, y, width, epsilon, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < width
        value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / width + epsilon)
        tl.store(y + row * width + at, (value * scale * weight).to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def softmax_kernel(x, y, width, scale, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < width
        value = tl.load(x + row * width + at, mask=inside, other=float("-inf")).to(tl.float32)
        value = value * scale
        power = tl.exp(value - tl.max(value))
        result = power / tl.sum(power)
        tl.store(y + row * width + at, result.to(y.dtype.element_ty), mask=inside)

    def warps(block):
        return max(4, min(16, block // 512))

    def rms(x, w):
        y, block = torch.empty_like(x), triton.next_power_of_2(x.shape[-1])
        rms_kernel[(x.shape[0],)](x, w, y, x.shape[-1], EPSILON, block, num_warps=warps(block))
        return y

    def softmax(x):
        y, block = torch.empty_like(x), triton.next_power_of_2(x.shape[-1])
        softmax_kernel[(x.shape[0],)](x, y, x.shape[-1], 0.125, block, num_warps=warps(block))
        return y

    return {"rms-norm": rms, "softmax": softmax}


def median_ms(prepare, device, samples):
    """Returns the median time of the function that `prepare` returns. The time of `prepare` is not included."""
    times = []
    for sample in range(samples + 5):
        run = prepare()
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end)
        else:
            begin = time.perf_counter()
            run()
            elapsed = (time.perf_counter() - begin) * 1e3
        if sample >= 5:
            times.append(elapsed)
    return statistics.median(times)


def time_torch(row, function, leaves, constants, device, samples):
    if row["direction"] == "forward":

        def prepare():
            return lambda: function(*leaves, *constants)

        with torch.no_grad():
            return median_ms(prepare, device, samples)
    tracked = [leaf.detach().requires_grad_() for leaf in leaves]
    gradient = torch.randn_like(function(*tracked, *constants))

    def prepare():
        output = function(*tracked, *constants)
        return lambda: torch.autograd.grad(output, tracked, gradient)

    return median_ms(prepare, device, samples)


def time_row(row, device, dtype, samples, triton):
    if row["operation"].startswith(("quantize-", "product-")):
        return time_fp8(row, device, dtype, samples)
    case = cases(row, device, dtype)
    if case is None:
        return {}
    function, leaves, constants = case
    times = {"eager": time_torch(row, function, leaves, constants, device, samples)}
    torch._dynamo.reset()
    compiled = torch.compile(function, dynamic=False)
    times["compiled"] = time_torch(row, compiled, leaves, constants, device, samples)
    kernel = triton.get(row["operation"])
    if kernel and device == "cuda" and row["direction"] == "forward" and row["width"] <= 65536:
        times["triton"] = time_torch(row, kernel, leaves, constants, device, samples)
    return times


def table(report, results):
    lines = [
        f"{report['device']}, {report['dtype']}, milliseconds (medians); torch {torch.__version__}; "
        "of 8-bit products `Burn's operations` are the same in this type",
        "",
        "| operation | direction | rows x width | copy | fused | Burn's operations | torch eager "
        "| torch compiled | Triton | fastest torch / fused |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cell = lambda value: "-" if value is None else f"{value:.4f}"
    for row, times in zip(report["rows"], results):
        fused, composed = row["fused_seconds"] * 1e3, row["composed_seconds"]
        best = min(times.values(), default=None)
        ratio = "-" if best is None or math.isnan(best) else f"{best / fused:.2f}"
        lines.append(
            f"| {row['operation']} | {row['direction']} | {row['rows']} x {row['width']} "
            f"| {cell(row['copy_seconds'] * 1e3)} | {cell(fused)} "
            f"| {cell(composed and composed * 1e3)} | {cell(times.get('eager'))} "
            f"| {cell(times.get('compiled'))} | {cell(times.get('triton'))} | {ratio} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", help="the JSON file of `burn-megatron-bench kernels --json`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--markdown", help="where the table goes besides the terminal")
    args = parser.parse_args()
    with open(args.report) as file:
        report = json.load(file)
    triton = triton_kernels()
    dtype = DTYPES[report["dtype"]]
    results = [
        time_row(row, args.device, dtype, args.samples, triton) for row in report["rows"]
    ]
    text = table(report, results)
    print(text)
    if args.markdown:
        with open(args.markdown, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
