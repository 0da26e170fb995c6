use super::*;

#[test]
fn every_half_to_f32_and_back() {
    compare(
        "cvt.f32.f16 %f0, %h1;",
        ["%h1"],
        "%f0",
        all_halves(),
        |[bits]| {
            let number = f16::from_bits(bits as u16).to_f32();
            if number.is_nan() {
                NAN
            } else {
                number.to_bits().into()
            }
        },
    );
    // The bits of a NaN are kept.
    compare(
        "cvt.f32.bf16 %f0, %h1;",
        ["%h1"],
        "%f0",
        all_halves(),
        |[bits]| bits << 16,
    );
    compare(
        "cvt.f64.f16 %d0, %h1;",
        ["%h1"],
        "%d0",
        all_halves(),
        |[bits]| {
            let number = f16::from_bits(bits as u16).to_f64();
            if number.is_nan() {
                NAN64
            } else {
                number.to_bits()
            }
        },
    );
    for of in ["f16", "bf16"] {
        let nan = if of == "f16" { 0x7c00 } else { 0x7f80 };
        let body = format!("cvt.f32.{of} %f1, %h1; cvt.rn.{of}.f32 %h0, %f1;");
        compare(&body, ["%h1"], "%h0", all_halves(), |[bits]| {
            if bits & 0x7fff > nan { 0x7fff } else { bits }
        });
    }
    for (rounding, toward) in [("rni", 'n'), ("rzi", 'z'), ("rmi", 'm'), ("rpi", 'p')] {
        compare(
            &format!("cvt.{rounding}.f16.f16 %h0, %h1;"),
            ["%h1"],
            "%h0",
            all_halves(),
            |[bits]| {
                let number = whole(f16::from_bits(bits as u16).to_f64(), toward);
                if number.is_nan() {
                    0x7fff
                } else {
                    f16::from_f64(number).to_bits().into()
                }
            },
        );
    }
}

#[test]
fn f32_to_halves() {
    let names = ["%f1"];
    compare(
        "cvt.rn.f16.f32 %h0, %f1;",
        names,
        "%h0",
        single_cases(1),
        |[bits]| {
            if single(bits).is_nan() {
                0x7fff
            } else {
                f16::from_f32(single(bits)).to_bits().into()
            }
        },
    );
    compare(
        "cvt.rn.bf16.f32 %h0, %f1;",
        names,
        "%h0",
        single_cases(2),
        |[bits]| {
            if single(bits).is_nan() {
                0x7fff
            } else {
                bf16::from_f32(single(bits)).to_bits().into()
            }
        },
    );
    // Directed rounding: the last code that does not exceed the number.
    for (of, wide) in [
        (
            "f16",
            (|bits| f16::from_bits(bits).to_f64()) as fn(u16) -> f64,
        ),
        ("bf16", |bits| bf16::from_bits(bits).to_f64()),
    ] {
        let top = if of == "f16" { 0x7c00 } else { 0x7f80 };
        let table: Vec<_> = (0..=top).map(wide).collect();
        for toward in ["rz", "rm", "rp"] {
            let body = format!("cvt.{toward}.{of}.f32 %h0, %f1;");
            let numbers = single_cases(3)
                .into_iter()
                .filter(|[bits]| single(*bits).is_finite());
            compare(&body, names, "%h0", numbers, |[bits]| {
                let (number, sign) = (f64::from(single(bits)), bits >> 16 & 0x8000);
                let below = table.partition_point(|one| *one <= number.abs()) - 1;
                let exact = table[below] == number.abs();
                let outward = matches!((toward, sign), ("rm", 0x8000) | ("rp", 0)) && !exact;
                sign | (below + usize::from(outward)) as u64
            });
        }
        let body = format!("cvt.rn.satfinite.{of}.f32 %h0, %f1;");
        compare(&body, names, "%h0", single_cases(4), |[bits]| {
            let number = single(bits);
            let near = if of == "f16" {
                f16::from_f32(number).to_bits()
            } else {
                bf16::from_f32(number).to_bits()
            };
            match near & 0x7fff {
                _ if number.is_nan() => 0x7fff,
                infinite if infinite == top => u64::from(near - 1),
                _ => near.into(),
            }
        });
        let body = format!("cvt.rn.relu.{of}.f32 %h0, %f1;");
        compare(&body, names, "%h0", single_cases(4), |[bits]| {
            let number = single(bits).max(0.0);
            match of {
                _ if single(bits).is_nan() => 0x7fff,
                _ if number <= 0.0 => 0,
                "f16" => f16::from_f32(number).to_bits().into(),
                _ => bf16::from_f32(number).to_bits().into(),
            }
        });
        let body = format!("cvt.rn.{of}x2.f32 %r0, %f1, %f2;");
        let cases = single_cases(5);
        let pairs = cases
            .iter()
            .zip(cases.iter().rev())
            .map(|([a], [b])| [*a, *b]);
        compare(&body, ["%f1", "%f2"], "%r0", pairs, |pair| {
            let [high, low] = pair.map(|bits| match (single(bits), of) {
                (number, _) if number.is_nan() => 0x7fff,
                (number, "f16") => u64::from(f16::from_f32(number).to_bits()),
                (number, _) => bf16::from_f32(number).to_bits().into(),
            });
            high << 16 | low
        });
    }
    compare(
        "cvt.rn.f16.f64 %h0, %d1;",
        ["%d1"],
        "%h0",
        [[(1.0f64 + 2f64.powi(-11) + 2f64.powi(-50)).to_bits()]],
        |_| 0x3c01,
    );
}

#[test]
fn between_f32_and_f64() {
    compare(
        "cvt.f64.f32 %d0, %f1;",
        ["%f1"],
        "%d0",
        single_cases(6),
        |[bits]| {
            let number = f64::from(single(bits));
            if number.is_nan() {
                NAN64
            } else {
                number.to_bits()
            }
        },
    );
    let canonical = |number: f32| {
        if number.is_nan() {
            NAN
        } else {
            number.to_bits().into()
        }
    };
    compare(
        "cvt.rn.f32.f64 %f0, %d1;",
        ["%d1"],
        "%f0",
        double_cases(7),
        |[bits]| canonical(f64::from_bits(bits) as f32),
    );
    compare(
        "cvt.rn.ftz.f32.f64 %f0, %d1;",
        ["%d1"],
        "%f0",
        double_cases(7),
        |[bits]| {
            let number = f64::from_bits(bits) as f32;
            canonical(if number.is_subnormal() {
                0f32.copysign(number)
            } else {
                number
            })
        },
    );
    for (name, toward) in [("rz", 'z'), ("rm", 'm'), ("rp", 'p')] {
        compare(
            &format!("cvt.{name}.f32.f64 %f0, %d1;"),
            ["%d1"],
            "%f0",
            double_cases(8),
            |[bits]| {
                let number = f64::from_bits(bits);
                let near = number as f32;
                let back = f64::from(near);
                canonical(match toward {
                    _ if number.is_nan() || back == number => near,
                    'm' if back > number => near.next_down(),
                    'p' if back < number => near.next_up(),
                    'z' if back.abs() > number.abs() => {
                        if number > 0.0 {
                            near.next_down()
                        } else {
                            near.next_up()
                        }
                    }
                    _ => near,
                })
            },
        );
    }
    compare(
        "cvt.sat.f32.f32 %f0, %f1;",
        ["%f1"],
        "%f0",
        single_cases(9),
        |[bits]| {
            let number = single(bits);
            if number > 0.0 {
                number.min(1.0).to_bits().into()
            } else {
                0
            }
        },
    );
    compare(
        "cvt.rn.sat.f32.f64 %f0, %d1;",
        ["%d1"],
        "%f0",
        double_cases(9),
        |[bits]| {
            let number = f64::from_bits(bits) as f32;
            if number > 0.0 {
                number.min(1.0).to_bits().into()
            } else {
                0
            }
        },
    );
    for (name, toward) in [("rni", 'n'), ("rzi", 'z'), ("rmi", 'm'), ("rpi", 'p')] {
        compare(
            &format!("cvt.{name}.f32.f32 %f0, %f1;"),
            ["%f1"],
            "%f0",
            single_cases(10),
            |[bits]| canonical(whole(single(bits).into(), toward) as f32),
        );
        compare(
            &format!("cvt.{name}.ftz.f32.f32 %f0, %f1;"),
            ["%f1"],
            "%f0",
            single_cases(10),
            |[bits]| {
                let number = single(bits);
                let number = if number.is_subnormal() {
                    0f32.copysign(number)
                } else {
                    number
                };
                canonical(whole(number.into(), toward) as f32)
            },
        );
        compare(
            &format!("cvt.{name}.f64.f64 %d0, %d1;"),
            ["%d1"],
            "%d0",
            double_cases(10),
            |[bits]| {
                let number = whole(f64::from_bits(bits), toward);
                if number.is_nan() {
                    NAN64
                } else {
                    number.to_bits()
                }
            },
        );
    }
    let cases = || single_cases(11).into_iter();
    compare(
        "cvt.rna.tf32.f32 %r0, %f1;",
        ["%f1"],
        "%r0",
        cases(),
        |[bits]| match single(bits) {
            number if number.is_nan() => NAN,
            number if number.is_infinite() => bits,
            // Half a unit is added, and the lower bits are cut off.
            _ => (bits + 0x1000) & !0x1fff,
        },
    );
    compare(
        "cvt.rn.relu.tf32.f32 %r0, %f1;",
        ["%f1"],
        "%r0",
        cases(),
        |[bits]| match single(bits) {
            number if number.is_nan() => NAN,
            number if number <= 0.0 => 0,
            number if number.is_infinite() => bits,
            _ => (bits + 0xfff + (bits >> 13 & 1)) & !0x1fff,
        },
    );
}
