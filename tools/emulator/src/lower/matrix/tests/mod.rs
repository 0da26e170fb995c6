//! Compares products with plain loops.

mod special;

use std::fmt::Write as _;

use super::element::*;
use crate::testing::{kernel, run_on};

/// The offset of each matrix in the buffer, in bytes.
const B: usize = 4096;
const C: usize = 8192;
const D: usize = 12288;
const END: usize = 16384;

/// Numbers with a long period.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// An element type: its name in PTX, its bits, and both conversions.
#[derive(Clone, Copy)]
struct Type {
    name: &'static str,
    bits: usize,
    value: fn(u64) -> f64,
    /// Returns the bits of an integer, from -8 to 8 for all signed types.
    whole: fn(i64) -> u64,
}

const fn of<E: Element>(name: &'static str, whole: fn(i64) -> u64) -> Type {
    Type {
        name,
        bits: E::BITS as usize,
        value: E::value,
        whole,
    }
}

const HALF: Type = of::<F16>("f16", |n| half::f16::from_f64(n as f64).to_bits().into());
const BRAIN: Type = of::<Bf16>("bf16", |n| half::bf16::from_f64(n as f64).to_bits().into());
const TENSOR: Type = of::<Tf32>("tf32", |n| (n as f32).to_bits().into());
const SINGLE: Type = of::<F32>("f32", |n| (n as f32).to_bits().into());
const DOUBLE: Type = of::<F64>("f64", |n| (n as f64).to_bits());
const SIGNED: Type = of::<S8>("s8", |n| n as u8 as u64);
const UNSIGNED: Type = of::<U8>("u8", |n| (n + 8) as u64);
const NIBBLE: Type = of::<S4>("s4", |n| (n.min(7) & 15) as u64);
const WHOLE: Type = of::<S32>("s32", |n| n as u32 as u64);
/// The sign and the exponent of a power of two.
const E4: Type = of::<E4m3>("e4m3", |n| {
    (n < 0) as u64 * 128 + (n.unsigned_abs() % 8 + 4) * 8
});
const E5: Type = of::<E5m2>("e5m2", |n| {
    (n < 0) as u64 * 128 + (n.unsigned_abs() % 8 + 12) * 4
});

type Matrix = Vec<f64>;

/// Returns `rows` by `columns` numbers of a type, and their bits in row-major order.
fn matrix(numbers: &mut Numbers, of: Type, rows: usize, columns: usize) -> (Matrix, Vec<u64>) {
    let bits: Vec<_> = (0..rows * columns)
        .map(|_| (of.whole)((numbers.next() % 17) as i64 - 8))
        .collect();
    (bits.iter().map(|bits| (of.value)(*bits)).collect(), bits)
}

/// Returns `A B + C`, which is exact for the numbers of these tests.
fn expected(a: &Matrix, b: &Matrix, c: &Matrix, [m, n, k]: [usize; 3]) -> Matrix {
    let mut d = c.clone();
    for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
        d[row * n + column] += (0..k)
            .map(|i| a[row * k + i] * b[i * n + column])
            .sum::<f64>();
    }
    d
}

fn put(buffer: &mut [u8], at: usize, bits: usize, value: u64) {
    buffer[at..at + bits / 8].copy_from_slice(&value.to_le_bytes()[..bits / 8]);
}

fn get(buffer: &[u8], at: usize, bits: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes[..bits / 8].copy_from_slice(&buffer[at..at + bits / 8]);
    u64::from_le_bytes(bytes)
}

fn names(prefix: &str, first: usize, count: usize) -> String {
    let names = (first..first + count).map(|number| format!("%{prefix}{number}"));
    names.collect::<Vec<_>>().join(", ")
}

/// Tests a product with `wmma`. The matrices are row-major or column-major, with gaps between their lines.
fn through_fragments(shape: [usize; 3], [a, c, d]: [Type; 3], by_rows: [bool; 3], space: &str) {
    let [m, n, k] = shape;
    let text = format!("m{m}n{n}k{k}");
    let mut numbers = Numbers(7 + m as u64);
    let sizes = [(m, k), (k, n), (m, n)];
    let matrices = [a, a, c].into_iter().zip(sizes);
    let matrices: Vec<_> = matrices
        .map(|(of, (rows, columns))| matrix(&mut numbers, of, rows, columns))
        .collect();
    let stride = |of: Type, (rows, columns): (usize, usize), by_rows: bool| {
        let line = if by_rows { columns } else { rows } * of.bits / 8;
        (line.next_multiple_of(16) + 16) * 8 / of.bits
    };
    let place = |of: Type, size: (usize, usize), by_rows: bool, row: usize, column: usize| {
        let (line, along) = if by_rows {
            (row, column)
        } else {
            (column, row)
        };
        (line * stride(of, size, by_rows) + along) * of.bits / 8
    };
    let mut buffer = vec![0u8; END];
    for (index, of) in [a, a, c].into_iter().enumerate() {
        let (rows, columns) = sizes[index];
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)))
        {
            let at = index * 4096 + place(of, sizes[index], by_rows[index], row, column);
            put(
                &mut buffer,
                at,
                of.bits,
                matrices[index].1[row * columns + column],
            );
        }
    }
    let counts = [a, a, c, d].map(|of| (of.bits.max(32) / of.bits, of));
    let registers =
        |(per, of): (usize, Type), (rows, columns): (usize, usize), operand: bool| match operand {
            true if of.name == "f16" => 8,
            _ => rows * columns / 32 / per,
        };
    let prefix = |of: Type| match of.name {
        "f64" => "d",
        "f32" => "f",
        _ => "r",
    };
    let list = |index: usize, first: usize| {
        let size = sizes[index.min(2)];
        format!(
            "{{{}}}",
            names(
                prefix(counts[index].1),
                first,
                registers(counts[index], size, index < 2)
            )
        )
    };
    let (fa, fb, fc, fd) = (list(0, 8), list(1, 24), list(2, 40), list(3, 48));
    let order = |index: usize| if by_rows[index] { "row" } else { "col" };
    let mut body = String::new();
    let copy = |body: &mut String, from: &str, to: &str| {
        for at in (0..END).step_by(16) {
            let vector = names("r", 0, 4);
            writeln!(body, "ld.{from}.v4.u32 {{{vector}}}, [%d0+{at}];\nst.{to}.v4.u32 [%d1+{at}], {{{vector}}};").ok();
        }
    };
    let base = match space {
        ".shared" => {
            body +=
                ".shared .align 128 .b8 tile[16384];\nmov.u64 %d1, tile;\nmov.u64 %d0, %data;\n";
            copy(&mut body, "global", "shared");
            "%d1"
        }
        _ => "%data",
    };
    for (index, letter, list) in [(0, 'a', &fa), (1, 'b', &fb), (2, 'c', &fc)] {
        let of = [a, a, c][index];
        let stride = stride(of, sizes[index], by_rows[index]);
        let (at, order, name) = (index * 4096, order(index), of.name);
        writeln!(body, "mov.u32 %r60, {stride};").ok();
        writeln!(body, "wmma.load.{letter}.sync.aligned.{order}.{text}{space}.{name} {list}, [{base}+{at}], %r60;").ok();
    }
    let types = match a.name {
        "f16" => format!("{}.{}", d.name, c.name),
        name => format!("{}.{name}.{name}.{}", d.name, c.name),
    };
    let (oa, ob) = (order(0), order(1));
    writeln!(
        body,
        "wmma.mma.sync.aligned.{oa}.{ob}.{text}.{types} {fd}, {fa}, {fb}, {fc};"
    )
    .ok();
    let wide = stride(d, (m, n), by_rows[2]);
    let (name, order) = (d.name, order(2));
    writeln!(
        body,
        "wmma.store.d.sync.aligned.{order}.{text}{space}.{name} [{base}+{D}], {fd}, {wide};"
    )
    .ok();
    if space == ".shared" {
        body += "mov.u64 %d0, tile;\nmov.u64 %d1, %data;\n";
        copy(&mut body, "shared", "global");
    }
    run_on(&kernel(&body), 32, &mut buffer).unwrap_or_else(|error| panic!("{error}\n{body}"));
    let wanted = expected(&matrices[0].0, &matrices[1].0, &matrices[2].0, shape);
    for (number, wanted) in wanted.iter().enumerate() {
        let (row, column) = (number / n, number % n);
        let at = D + place(d, (m, n), by_rows[2], row, column);
        let found = (d.value)(get(&buffer, at, d.bits));
        assert_eq!(found, *wanted, "{text} {types} at ({row}, {column})");
        put(&mut buffer, at, d.bits, 0);
    }
    assert!(
        buffer[D..].iter().all(|byte| *byte == 0),
        "{text} {types} writes between the lines"
    );
}

#[test]
fn fragments_of_all_shapes_and_types_multiply() {
    const SHAPES: [[usize; 3]; 3] = [[16, 16, 16], [32, 8, 16], [8, 32, 16]];
    let orders = (0..8).map(|bits| [bits & 1 == 0, bits & 2 == 0, bits & 4 == 0]);
    for (number, by_rows) in orders.enumerate() {
        let space = ["", ".global", ".shared"][number % 3];
        for shape in SHAPES {
            through_fragments(shape, [HALF, SINGLE, SINGLE], by_rows, space);
            through_fragments(shape, [HALF, HALF, HALF], by_rows, space);
            through_fragments(shape, [HALF, SINGLE, HALF], by_rows, space);
            through_fragments(shape, [BRAIN, SINGLE, SINGLE], by_rows, space);
            through_fragments(shape, [SIGNED, WHOLE, WHOLE], by_rows, space);
            through_fragments(shape, [UNSIGNED, WHOLE, WHOLE], by_rows, space);
        }
        through_fragments([16, 16, 8], [TENSOR, SINGLE, SINGLE], by_rows, space);
        through_fragments([8, 8, 4], [DOUBLE, DOUBLE, DOUBLE], by_rows, space);
    }
}

/// Returns the row and the column of the `i`th element of `A` in a lane, by the manual's tables.
fn of_a([m, _, _]: [usize; 3], bits: usize, lane: usize, i: usize) -> (usize, usize) {
    let per = (32 / bits).max(1);
    let (group, thread) = (lane / 4, lane % 4);
    let (register, part) = (i / per, i % per);
    match m {
        8 => (group, thread * per + part),
        _ => (
            group + if register % 2 == 1 { 8 } else { 0 },
            (thread + 4 * (register / 2)) * per + part,
        ),
    }
}

/// Returns the row and the column of the `i`th element of `B`.
fn of_b(bits: usize, lane: usize, i: usize) -> (usize, usize) {
    let per = (32 / bits).max(1);
    ((lane % 4 + 4 * (i / per)) * per + i % per, lane / 4)
}

/// Returns the row and the column of the `i`th element of `C` and `D`.
fn of_c(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + if i < 2 { 0 } else { 8 }, lane % 4 * 2 + i % 2)
}

/// Tests a product with `mma.sync`. Each lane has the registers of the manual.
fn through_registers(shape: [usize; 3], [a, b, c, d]: [Type; 4], extra: &str) {
    let [m, n, k] = shape;
    let mut numbers = Numbers(99 + k as u64);
    let (va, bits_a) = matrix(&mut numbers, a, m, k);
    let (vb, bits_b) = matrix(&mut numbers, b, k, n);
    let (vc, bits_c) = matrix(&mut numbers, c, m, n);
    let mut buffer = vec![0u8; END];
    // The elements of a lane are adjacent.
    let elements = [m * k / 32, k * n / 32, m * n / 32];
    let mut fill =
        |at: usize, of: Type, lane: usize, count: usize, element: &dyn Fn(usize) -> u64| {
            for i in 0..count {
                let bit = (lane * count + i) * of.bits;
                let byte = &mut buffer[at + bit / 8..];
                match of.bits {
                    4 => byte[0] |= (element(i) as u8) << (bit % 8),
                    _ => put(byte, 0, of.bits, element(i)),
                }
            }
        };
    for lane in 0..32 {
        let index = |(row, column): (usize, usize), columns: usize| row * columns + column;
        fill(0, a, lane, elements[0], &|i| {
            bits_a[index(of_a(shape, a.bits, lane, i), k)]
        });
        fill(B, b, lane, elements[1], &|i| {
            bits_b[index(of_b(b.bits, lane, i), n)]
        });
        fill(C, c, lane, elements[2], &|i| {
            bits_c[index(of_c(lane, i), n)]
        });
    }
    let prefix = |of: Type| match of.bits {
        64 => ("d", 8),
        32 if of.name == "f32" => ("f", 4),
        _ => ("r", 4),
    };
    let mut body = String::from("mov.u32 %r0, %laneid;\n");
    let mut lists = Vec::new();
    for (index, of) in [a, b, c, d].into_iter().enumerate() {
        let (prefix, size) = prefix(of);
        let count = elements[index.min(2)] * of.bits / 8 / size;
        let first = 4 + index * 12;
        lists.push(format!("{{{}}}", names(prefix, first, count)));
        writeln!(
            body,
            "mul.wide.u32 %d0, %r0, {};\nadd.u64 %d{}, %d0, %data;",
            count * size,
            index + 50
        )
        .ok();
        if index < 3 {
            for number in 0..count {
                let at = index * 4096 + number * size;
                let register = first + number;
                writeln!(
                    body,
                    "ld.global.b{} %{prefix}{register}, [%d{}+{at}];",
                    size * 8,
                    index + 50
                )
                .ok();
            }
        }
    }
    let [fa, fb, fc, fd] = &lists[..] else {
        unreachable!()
    };
    let types = format!("{}.{}.{}.{}", d.name, a.name, b.name, c.name);
    writeln!(
        body,
        "mma.sync.aligned.m{m}n{n}k{k}.row.col{extra}.{types} {fd}, {fa}, {fb}, {fc};"
    )
    .ok();
    let (prefix, size) = prefix(d);
    for number in 0..elements[2] * d.bits / 8 / size {
        let (at, register) = (D + number * size, 40 + number);
        writeln!(
            body,
            "st.global.b{} [%d53+{at}], %{prefix}{register};",
            size * 8
        )
        .ok();
    }
    run_on(&kernel(&body), 32, &mut buffer).unwrap_or_else(|error| panic!("{error}\n{body}"));
    let wanted = expected(&va, &vb, &vc, shape);
    for (lane, i) in (0..32).flat_map(|lane| (0..elements[2]).map(move |i| (lane, i))) {
        let (row, column) = of_c(lane, i);
        let found = (d.value)(get(
            &buffer,
            D + (lane * elements[2] + i) * d.bits / 8,
            d.bits,
        ));
        assert_eq!(
            found,
            wanted[row * n + column],
            "m{m}n{n}k{k} {types} at ({row}, {column})"
        );
    }
}

#[test]
fn registers_of_all_shapes_and_types_multiply() {
    for k in [8, 16] {
        through_registers([16, 8, k], [HALF, HALF, SINGLE, SINGLE], "");
        through_registers([16, 8, k], [HALF, HALF, HALF, HALF], "");
        through_registers([16, 8, k], [BRAIN, BRAIN, SINGLE, SINGLE], "");
        through_registers([16, 8, k / 2], [TENSOR, TENSOR, SINGLE, SINGLE], "");
        through_registers([16, 8, k * 2], [SIGNED, UNSIGNED, WHOLE, WHOLE], "");
        through_registers(
            [16, 8, k * 2],
            [UNSIGNED, SIGNED, WHOLE, WHOLE],
            ".satfinite",
        );
        through_registers([16, 8, k * 4], [NIBBLE, NIBBLE, WHOLE, WHOLE], "");
    }
    through_registers([8, 8, 16], [SIGNED, SIGNED, WHOLE, WHOLE], "");
    through_registers([8, 8, 32], [NIBBLE, NIBBLE, WHOLE, WHOLE], "");
    for k in [4, 8, 16] {
        through_registers([16, 8, k], [DOUBLE, DOUBLE, DOUBLE, DOUBLE], "");
    }
    through_registers([8, 8, 4], [DOUBLE, DOUBLE, DOUBLE, DOUBLE], "");
    through_registers([16, 8, 32], [E4, E5, SINGLE, SINGLE], "");
    through_registers([16, 8, 32], [E4, E4, SINGLE, SINGLE], ".kind::f8f6f4");
}
