use super::*;

/// Integer types: name, bits, whether they are signed.
const WHOLE: [(&str, u32, bool); 8] = [
    ("u8", 8, false),
    ("s8", 8, true),
    ("u16", 16, false),
    ("s16", 16, true),
    ("u32", 32, false),
    ("s32", 32, true),
    ("u64", 64, false),
    ("s64", 64, true),
];

fn ones(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

fn bounds(bits: u32, signed: bool) -> (i128, i128) {
    if signed {
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    } else {
        (0, (1 << bits) - 1)
    }
}

/// Returns a register with at least this number of bits, and its width.
fn register(bits: u32, number: u32) -> (String, u32) {
    match bits {
        8 | 16 => (format!("%h{number}"), 16),
        32 => (format!("%r{number}"), 32),
        _ => (format!("%d{number}"), 64),
    }
}

fn value(number: u64, bits: u32, signed: bool) -> i128 {
    let number = i128::from(number & ones(bits));
    if signed && number >> (bits - 1) == 1 {
        number - (1 << bits)
    } else {
        number
    }
}

fn whole_cases() -> Vec<[u64; 1]> {
    let mut random = Random::new(20);
    let edges = [8, 16, 24, 25, 32, 53, 54, 63, 64]
        .into_iter()
        .flat_map(|bits| {
            let ones = ones(bits);
            [
                ones,
                ones - 1,
                ones >> 1,
                (ones >> 1) + 1,
                ones << 1,
                !ones,
                !(ones >> 1),
            ]
        });
    let numbers: Vec<_> = edges.chain([0, 1, 0x80, 0xff80]).collect();
    let more = (0..500).map(|at| random.next() >> (at % 64));
    numbers
        .into_iter()
        .chain(more)
        .map(|number| [number])
        .collect()
}

#[test]
fn between_whole_numbers() {
    for (to, to_bits, to_signed) in WHOLE {
        for (from, bits, signed) in WHOLE {
            let ((out, width), (a, own)) = (register(to_bits, 0), register(bits, 1));
            let cases = || {
                whole_cases()
                    .into_iter()
                    .map(|[number]| [number & ones(own)])
            };
            let body = format!("cvt.{to}.{from} {out}, {a};");
            compare(&body, [&a], &out, cases(), |[number]| {
                // The number is truncated, then extended to the register with the sign of its type.
                value(value(number, bits, signed) as u64, to_bits, to_signed) as u64 & ones(width)
            });
            let (least, most) = bounds(to_bits, to_signed);
            let body = format!("cvt.sat.{to}.{from} {out}, {a};");
            compare(&body, [&a], &out, cases(), |[number]| {
                value(number, bits, signed).clamp(least, most) as u64 & ones(width)
            });
        }
    }
    // Conversions into registers that are wider than the type.
    compare(
        "cvt.s8.s32 %r0, %r1;",
        ["%r1"],
        "%r0",
        [[0x80], [0x17f]],
        |[a]| if a == 0x80 { 0xffff_ff80 } else { 0x7f },
    );
    compare("cvt.u8.u32 %d0, %r1;", ["%r1"], "%d0", [[0x1ff]], |_| 0xff);
    refusal("cvt.rn.s32.s64 %r0, %d1;");
    refusal("cvt.s32.s32 %h0, %r1;");
}

#[test]
fn floating_point_to_whole_numbers() {
    for (to, bits, signed) in WHOLE {
        let (least, most) = bounds(bits, signed);
        let (out, width) = register(bits, 0);
        for (rounding, toward) in [("rni", 'n'), ("rzi", 'z'), ("rmi", 'm'), ("rpi", 'p')] {
            let result = |number: f64, of_64: bool| {
                if number.is_nan() {
                    return if of_64 || bits == 64 {
                        1 << (bits - 1)
                    } else {
                        0
                    };
                }
                // `as` saturates at the range of i128.
                (whole(number, toward) as i128).clamp(least, most) as u64 & ones(width)
            };
            let body = format!("cvt.{rounding}.{to}.f32 {out}, %f1;");
            compare(&body, ["%f1"], &out, single_cases(21), |[a]| {
                result(single(a).into(), false)
            });
            let body = format!("cvt.{rounding}.{to}.f64 {out}, %d1;");
            compare(&body, ["%d1"], &out, double_cases(22), |[a]| {
                result(f64::from_bits(a), true)
            });
            let cases = || all_halves().step_by(7);
            let body = format!("cvt.{rounding}.{to}.f16 {out}, %h1;");
            compare(&body, ["%h1"], &out, cases(), |[a]| {
                result(f16::from_bits(a as u16).to_f64(), false)
            });
            let body = format!("cvt.{rounding}.{to}.bf16 {out}, %h1;");
            compare(&body, ["%h1"], &out, cases(), |[a]| {
                result(bf16::from_bits(a as u16).to_f64(), false)
            });
        }
    }
    compare(
        "cvt.rpi.ftz.s32.f32 %r0, %f1;",
        ["%f1"],
        "%r0",
        [[1], [0x0080_0000]],
        |[a]| u64::from(a > 1),
    );
    refusal("cvt.s32.f32 %r0, %f1;");
    refusal("cvt.rn.s32.f32 %r0, %f1;");
    refusal("cvt.rzi.ftz.s32.f64 %r0, %d1;");
}

#[test]
fn whole_numbers_to_floating_point() {
    for (from, bits, signed) in WHOLE {
        let (a, own) = register(bits, 1);
        let cases = || {
            whole_cases()
                .into_iter()
                .map(|[number]| [number & ones(own)])
        };
        let of = |number: u64| value(number, bits, signed);
        compare(
            &format!("cvt.rn.f32.{from} %f0, {a};"),
            [&a],
            "%f0",
            cases(),
            |[number]| (of(number) as f32).to_bits().into(),
        );
        compare(
            &format!("cvt.rn.f64.{from} %d0, {a};"),
            [&a],
            "%d0",
            cases(),
            |[number]| (of(number) as f64).to_bits(),
        );
        for (rounding, toward) in [("rz", 'z'), ("rm", 'm'), ("rp", 'p')] {
            compare(
                &format!("cvt.{rounding}.f32.{from} %f0, {a};"),
                [&a],
                "%f0",
                cases(),
                |[number]| {
                    let number = of(number);
                    let near = number as f32;
                    let back = near as i128;
                    let result = match toward {
                        'z' if back.abs() > number.abs() => f32::from_bits(near.to_bits() - 1),
                        'm' if back > number => near.next_down(),
                        'p' if back < number => near.next_up(),
                        _ => near,
                    };
                    result.to_bits().into()
                },
            );
        }
        // For a number of at most 64 bits, f64 rounded to odd rounds like the number itself.
        compare(
            &format!("cvt.rn.f16.{from} %h0, {a};"),
            [&a],
            "%h0",
            cases(),
            |[number]| {
                let number = of(number).clamp(-1 << 20, 1 << 20);
                f16::from_f32(number as f32).to_bits().into()
            },
        );
        compare(
            &format!("cvt.rn.bf16.{from} %h0, {a};"),
            [&a],
            "%h0",
            cases(),
            |[number]| {
                let number = of(number);
                // Rounded to 8 bits in integer arithmetic.
                let size = number.unsigned_abs();
                let drop = 128u32.saturating_sub(size.leading_zeros() + 8);
                let (kept, rest, half) = (size >> drop, size & ((1 << drop) - 1), (1 << drop) / 2);
                let up = drop > 0 && (rest > half || rest == half && kept & 1 == 1);
                let rounded = (kept + u128::from(up)) << drop;
                let result = rounded as f32 * if number < 0 { -1.0 } else { 1.0 };
                u64::from(result.to_bits() >> 16)
            },
        );
    }
}

#[test]
fn packed_whole_numbers() {
    let cases: Vec<_> = whole_cases()
        .iter()
        .zip(whole_cases().iter().rev())
        .map(|([a], [b])| [a & ones(32), b & ones(32), 0x1234_5678])
        .collect();
    let names = ["%r1", "%r2", "%r3"];
    for (name, bits, signed) in [
        ("u8", 8, false),
        ("s8", 8, true),
        ("u4", 4, false),
        ("s2", 2, true),
    ] {
        let (least, most) = bounds(bits, signed);
        let body = format!("cvt.pack.sat.{name}.s32.b32 %r0, %r1, %r2, %r3;");
        compare(&body, names, "%r0", cases.clone(), |[a, b, c]| {
            let [a, b] =
                [a, b].map(|one| value(one, 32, true).clamp(least, most) as u64 & ones(bits));
            (c << (2 * bits) | a << bits | b) & ones(32)
        });
    }
    compare(
        "cvt.pack.sat.s16.s32 %r0, %r1, %r2;",
        names,
        "%r0",
        cases,
        |[a, b, _]| {
            let [a, b] =
                [a, b].map(|one| value(one, 32, true).clamp(-32768, 32767) as u64 & 0xffff);
            a << 16 | b
        },
    );
    refusal("cvt.pack.sat.u16.s32.b32 %r0, %r1, %r2, %r3;");
}
