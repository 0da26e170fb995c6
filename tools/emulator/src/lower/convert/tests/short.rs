use super::*;

/// Returns the value of an 8-bit code, by the definition of its format.
fn eight(code: u64, exponent_bits: u32, fraction_bits: u32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let sign = if code >> (exponent_bits + fraction_bits) & 1 == 1 {
        -1.0
    } else {
        1.0
    };
    let exponent = (code >> fraction_bits) as i32 & ((1 << exponent_bits) - 1);
    let fraction = (code & ((1 << fraction_bits) - 1)) as f64 / f64::from(1 << fraction_bits);
    sign * match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    }
}

/// Formats: name, bits of exponent and fraction, the code of the largest number, the code of NaN, and the stride.
const SHORT: [(&str, u32, u32, u64, u64, u32); 5] = [
    ("e4m3", 4, 3, 0x7e, 0x7f, 8),
    ("e5m2", 5, 2, 0x7b, 0x7f, 8),
    ("e2m3", 2, 3, 0x1f, 0x1f, 8),
    ("e3m2", 3, 2, 0x1f, 0x1f, 8),
    ("e2m1", 2, 1, 0x7, 0x7, 4),
];

#[test]
fn short_formats_and_back() {
    for (name, exponent, fraction, largest, nan, apart) in SHORT {
        let table: Vec<_> = (0..=largest)
            .map(|code| eight(code, exponent, fraction))
            .collect();
        let sign = 1 << (exponent + fraction);
        let nearest = |number: f64| {
            if number.is_nan() {
                return nan;
            }
            let (size, sign) = (
                number.abs(),
                if number.is_sign_negative() { sign } else { 0 },
            );
            let above = table.partition_point(|one| *one < size);
            let code = match above {
                0 => 0,
                _ if above == table.len() => largest,
                _ => {
                    let (low, high) = (size - table[above - 1], table[above] - size);
                    let up = high < low || high == low && above % 2 == 0;
                    (above - usize::from(!up)) as u64
                }
            };
            sign | code
        };
        let (out, input) = match apart {
            // The value passes through an 8-bit register, as in CUDA's headers.
            4 => (".reg .b8 x; mov.u16 %h0, 0; ", " mov.b16 %h0, {x, 0};"),
            _ => ("", ""),
        };
        let result = if apart == 4 { "x" } else { "%h0" };
        let body = format!("{{ {out}cvt.rn.satfinite.{name}x2.f32 {result}, %f1, %f2;{input} }}");
        let cases = single_cases(30);
        let pairs = || {
            cases
                .iter()
                .zip(cases.iter().rev())
                .map(|([a], [b])| [*a, *b])
        };
        compare(&body, ["%f1", "%f2"], "%h0", pairs(), |[high, low]| {
            nearest(single(high).into()) << apart | nearest(single(low).into())
        });
        let body =
            format!("{{ {out}cvt.rn.satfinite.relu.{name}x2.f32 {result}, %f1, %f2;{input} }}");
        compare(&body, ["%f1", "%f2"], "%h0", pairs(), |pair| {
            let [high, low] = pair.map(|bits| match f64::from(single(bits)) {
                number if number <= 0.0 => 0,
                number => nearest(number),
            });
            high << apart | low
        });
        let body = format!("{{ {out}cvt.rn.satfinite.{name}x2.f16x2 {result}, %r1;{input} }}");
        let halves = (0..=0xffff_u64).map(|bits| [bits | (bits ^ 0x5a5a) << 16]);
        compare(&body, ["%r1"], "%h0", halves, |[both]| {
            let of = |bits: u64| nearest(f16::from_bits(bits as u16).to_f64());
            of(both >> 16) << apart | of(both)
        });
        // Converts every code, and back.
        let codes = (0..=0xff_u64).map(|code| {
            [if apart == 4 {
                code
            } else {
                code | (code ^ 0x33) << 8
            }]
        });
        let (before, source) = if apart == 4 {
            (".reg .b8 x, y; mov.b16 {x, y}, %h1; ", "x")
        } else {
            ("", "%h1")
        };
        let body = format!("{{ {before}cvt.rn.f16x2.{name}x2 %r0, {source}; }}");
        compare(&body, ["%h1"], "%r0", codes, |[both]| {
            let of = |code: u64| {
                let code = code & (2 * sign - 1);
                let special = code & (sign - 1) > largest;
                match (special, name) {
                    (true, "e5m2") if code & 3 == 0 => 0x7c00 | (code & 0x80) << 8,
                    (true, _) => 0x7fff,
                    _ => f16::from_f64(eight(code, exponent, fraction))
                        .to_bits()
                        .into(),
                }
            };
            of(both >> apart) << 16 | of(both)
        });
    }
    refusal("cvt.rn.e4m3x2.f32 %h0, %f1, %f2;");
    refusal("cvt.rn.bf16x2.e4m3x2 %r0, %h1;");
    refusal("cvt.rn.satfinite.e9m9x2.f32 %h0, %f1, %f2;");
}

#[test]
fn powers_of_two() {
    for (rounding, up) in [("rz", false), ("rp", true)] {
        for finite in [false, true] {
            let modifier = if finite { ".satfinite" } else { "" };
            let code = |number: f32| {
                let size = f64::from(number.abs());
                if number.is_nan() || number.is_infinite() {
                    return if finite && number.is_infinite() {
                        0xfe
                    } else {
                        0xff
                    };
                }
                let exponent = size.log2();
                let exponent = if up {
                    exponent.ceil()
                } else {
                    exponent.floor()
                };
                let code = (exponent.max(-127.0) + 127.0) as u64;
                if finite { code.min(0xfe) } else { code }
            };
            let body = format!("cvt.{rounding}{modifier}.ue8m0x2.f32 %h0, %f1, %f2;");
            let numbers = [
                1.0f32,
                1.5,
                2.0,
                0.0,
                1e-40,
                5.9e-39,
                2f32.powi(-127),
                2f32.powi(-126),
                f32::MAX,
                f32::INFINITY,
                f32::NAN,
                -3.0,
                0.3,
            ];
            let pairs = numbers
                .iter()
                .zip(numbers.iter().rev())
                .map(|pair| [*pair.0, *pair.1].map(|one| one.to_bits().into()));
            compare(&body, ["%f1", "%f2"], "%h0", pairs, |[high, low]| {
                code(single(high)) << 8 | code(single(low))
            });
            let body = format!("cvt.{rounding}{modifier}.ue8m0x2.bf16x2 %h0, %r1;");
            let halves =
                numbers.map(|one| [u64::from(bf16::from_f32(one).to_bits()) | 0x3f80_0000]);
            compare(&body, ["%r1"], "%h0", halves, |[both]| {
                0x7f00 | code(bf16::from_bits(both as u16).to_f32())
            });
        }
    }
    compare(
        "cvt.rn.bf16x2.ue8m0x2 %r0, %h1;",
        ["%h1"],
        "%r0",
        (0..256).map(|code| [code | 0x8000]),
        |[both]| {
            let code = both & 0xff;
            let number = bf16::from_f64(2f64.powi(code as i32 - 127));
            0x4000_0000
                | if code == 255 {
                    0x7fff
                } else {
                    number.to_bits().into()
                }
        },
    );
}
