//! Lowers `mma.sync` and `wmma.mma`.

use super::element::*;
use super::fragment::{Fragment, MatrixRole, Shape};
use super::{only, registers};
use crate::machine::{Step, Warp};
use crate::ptx::Instruction;

/// The number of elements of the largest matrix: `A` of m16n8k64.
const LARGEST: usize = 16 * 64;

type Gather = fn(&Fragment, &Warp, &mut [f64]);
type Scatter = fn(&Fragment, &mut Warp, &[f64]);
/// A function of `A`, `B`, the sums, and the number of columns of `A`.
type Multiply = fn(&[f64], &[f64], &mut [f64], usize);

/// The shapes of `mma.sync`, by the number of bits of `A`'s elements.
const SHAPES: &[(u32, &[&str])] = &[
    (4, &["m8n8k32", "m16n8k32", "m16n8k64"]),
    (8, &["m8n8k16", "m16n8k16", "m16n8k32"]),
    (16, &["m16n8k8", "m16n8k16"]),
    (32, &["m16n8k4", "m16n8k8"]),
    (64, &["m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"]),
];

/// The shapes of `wmma`.
const FRAGMENTS: &[(u32, &[&str])] = &[
    (8, &["m16n16k16", "m32n8k16", "m8n32k16"]),
    (16, &["m16n16k16", "m32n8k16", "m8n32k16"]),
    (32, &["m16n16k8"]),
    (64, &["m8n8k4"]),
];

/// Lowers `D = A B + C`.
pub(super) fn product(instruction: &Instruction) -> Result<Step, String> {
    let fragments = instruction.name == "wmma";
    let types: Vec<_> = types(instruction);
    let [d, a, b, c] = match *types.as_slice() {
        // The short form for products of f16.
        [d, c] if fragments => [d, "f16", "f16", c],
        [d, a, b, c] => [d, a, b, c],
        _ => return Err(format!("{} types", types.len())),
    };
    let (bits, gather_a) = operand(a)?;
    let (bits_b, gather_b) = operand(b)?;
    let (shape, text) = shape(instruction, fragments, bits)?;
    let other = [
        text,
        "sync",
        "aligned",
        "row",
        "col",
        "mma",
        "rn",
        "satfinite",
        "kind::f8f6f4",
    ];
    only(instruction, &[&types, &other])?;
    let layouts = instruction
        .modifiers
        .iter()
        .filter(|name| *name == "row" || *name == "col");
    let layouts: Vec<_> = layouts.map(String::as_str).collect();
    if layouts.len() != 2 || !fragments && layouts != ["row", "col"] {
        return Err(format!("the layouts {layouts:?}"));
    }
    if bits != bits_b || family(a) != family(b) || !accumulates(family(a), c, d) {
        return Err(format!("the types {d}, {a}, {b}, {c} do not go together"));
    }
    let saturate = instruction.has("satfinite");
    if saturate && d != "s32" {
        return Err(".satfinite of a floating-point product".into());
    }
    let (bits_c, gather_c) = operand(c)?;
    let (bits_d, scatter) = result(d, saturate)?;
    let fragment = |place, role, bits| {
        let registers = registers(instruction, place)?;
        let wanted = match (fragments, role, bits) {
            (true, MatrixRole::A | MatrixRole::B, 16) if a == "f16" => 8,
            _ => shape.registers(role, bits),
        };
        if registers.len() == wanted {
            Ok(Fragment::new(shape, role, bits, &registers))
        } else {
            Err(format!(
                "{} registers for {role:?}, not {wanted}",
                registers.len()
            ))
        }
    };
    let target = fragment(0, MatrixRole::Sum, bits_d)?;
    let left = fragment(1, MatrixRole::A, bits)?;
    let right = fragment(2, MatrixRole::B, bits)?;
    let sums = fragment(3, MatrixRole::Sum, bits_c)?;
    let multiply: Multiply = match (shape.n, a) {
        (_, "f64") => fused::<8>,
        (8, _) => multiply::<8>,
        (16, _) => multiply::<16>,
        (32, _) => multiply::<32>,
        (columns, _) => return Err(format!("{columns} columns")),
    };
    let Shape { m, n, k } = shape;
    Ok(Box::new(move |warp, _, block| {
        block.counts.matrix_flops += 2 * (m * n * k) as u64;
        let (mut a, mut b, mut d) = ([0.0; LARGEST], [0.0; LARGEST / 2], [0.0; LARGEST / 4]);
        let (a, b, d) = (&mut a[..m * k], &mut b[..k * n], &mut d[..m * n]);
        gather_a(&left, warp, a);
        gather_b(&right, warp, b);
        gather_c(&sums, warp, d);
        multiply(a, b, d, k);
        scatter(&target, warp, d);
        Ok(())
    }))
}

fn types(instruction: &Instruction) -> Vec<&str> {
    let names = instruction.modifiers.iter().map(String::as_str);
    names.filter(|name| operand(name).is_ok()).collect()
}

fn shape(instruction: &Instruction, fragments: bool, bits: u32) -> Result<(Shape, &str), String> {
    let shapes = if fragments { FRAGMENTS } else { SHAPES };
    let known = shapes
        .iter()
        .filter(|(of, _)| *of == bits)
        .flat_map(|(_, shapes)| *shapes);
    let found = known.copied().find(|shape| instruction.has(shape));
    let shape = found.and_then(|text| Some((Shape::parse(text)?, text)));
    shape.ok_or_else(|| format!("no shape that elements of {bits} bits have"))
}

/// Returns the family of types of `A` and `B` that can be multiplied.
fn family(name: &str) -> &str {
    match name {
        "s8" | "u8" => "8",
        "s4" | "u4" => "4",
        "e4m3" | "e5m2" | "e3m2" | "e2m3" | "e2m1" => "small",
        other => other,
    }
}

/// Returns whether a family of types supports these accumulators.
fn accumulates(family: &str, c: &str, d: &str) -> bool {
    let half = |name| matches!(name, "f16" | "f32");
    match family {
        "f16" | "small" => half(c) && half(d),
        "bf16" | "tf32" => (c, d) == ("f32", "f32"),
        "8" | "4" => (c, d) == ("s32", "s32"),
        "f64" => (c, d) == ("f64", "f64"),
        _ => false,
    }
}

fn operand(name: &str) -> Result<(u32, Gather), String> {
    fn of<E: Element>() -> (u32, Gather) {
        (E::BITS, Fragment::gather::<E>)
    }
    Ok(match name {
        "f16" => of::<F16>(),
        "bf16" => of::<Bf16>(),
        "tf32" => of::<Tf32>(),
        "f32" => of::<F32>(),
        "f64" => of::<F64>(),
        "s8" => of::<S8>(),
        "u8" => of::<U8>(),
        "s4" => of::<S4>(),
        "u4" => of::<U4>(),
        "s32" => of::<S32>(),
        "e4m3" => of::<E4m3>(),
        "e5m2" => of::<E5m2>(),
        "e3m2" => of::<E3m2>(),
        "e2m3" => of::<E2m3>(),
        "e2m1" => of::<E2m1>(),
        _ => return Err(format!("unsupported matrix type {name}")),
    })
}

fn result(name: &str, saturate: bool) -> Result<(u32, Scatter), String> {
    fn of<E: Accumulator>() -> (u32, Scatter) {
        (E::BITS, Fragment::scatter::<E>)
    }
    Ok(match name {
        "f16" => of::<F16>(),
        "f32" => of::<F32>(),
        "f64" => of::<F64>(),
        "s32" if saturate => of::<Saturated>(),
        "s32" => of::<S32>(),
        _ => return Err(format!("unsupported accumulator type {name}")),
    })
}

/// Adds the products of rows of `a` and columns of `b` in the order of `k`. The products are exact.
fn multiply<const N: usize>(a: &[f64], b: &[f64], sums: &mut [f64], k: usize) {
    for (row, sums) in a.chunks_exact(k).zip(sums.as_chunks_mut::<N>().0) {
        let mut total = *sums;
        for (left, right) in row.iter().zip(b.as_chunks::<N>().0) {
            for (sum, right) in total.iter_mut().zip(right) {
                *sum += left * right;
            }
        }
        *sums = total;
    }
}

/// Adds products like [`multiply`], for types whose products are not exact.
fn fused<const N: usize>(a: &[f64], b: &[f64], sums: &mut [f64], k: usize) {
    for (row, sums) in a.chunks_exact(k).zip(sums.as_chunks_mut::<N>().0) {
        for (left, right) in row.iter().zip(b.as_chunks::<N>().0) {
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum = left.mul_add(*right, *sum);
            }
        }
    }
}
