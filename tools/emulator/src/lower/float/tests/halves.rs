use super::*;

fn half_cases(seed: u64) -> Vec<[u64; 3]> {
    let edges = [
        0, 0x8000, 1, 0x8001, 0x3ff, 0x400, 0x7f, 0x80, 0x3c00, 0xbc00, 0x3f80, 0x7bff, 0xfbff,
        0x7c00, 0xfc00, 0x7e00, 0x7fff, 0xff80, 0x7f80, 0x7f7f,
    ];
    let mut random = Random::new(seed);
    let mut some = || match random.next() % 3 {
        0 => edges[random.next() as usize % edges.len()],
        _ => random.next() & 0xffff,
    };
    let mut cases: Vec<_> = (0..12_000).map(|_| [some(), some(), some()]).collect();
    // Numbers of similar size, so that results are rounded and sums cancel.
    cases.extend((0..12_000).map(|_| [0; 3].map(|_: u64| 0x3800 + (random.next() & 0x87ff))));
    cases
}

#[test]
fn halves_are_rounded_once() {
    type Function = fn([ExactNumber; 3]) -> ExactNumber;
    for (of, format) in [("f16", F16), ("bf16", BF16)] {
        for (name, list, expected) in [
            (
                "add",
                "1, ?2",
                (|[a, b, _]| add(a, b, Mode::Nearest)) as Function,
            ),
            ("sub.rn", "1, ?2", |[a, b, _]| {
                add(a, b.negated(), Mode::Nearest)
            }),
            ("mul", "1, ?2", |[a, b, _]| multiply(a, b)),
            ("fma.rn", "1, ?2, ?3", |[a, b, c]| {
                add(multiply(a, b), c, Mode::Nearest)
            }),
        ] {
            let result = |all: [u64; 3]| {
                let exact = expected(all.map(|one| format.decode(one & 0xffff)));
                format.encode(exact, Mode::Nearest, false)
            };
            let body = format!("{name}.{of} %h0, ?{list};").replace('?', "%h");
            compare(&body, ["%h1", "%h2", "%h3"], "%h0", half_cases(10), result);
            let body = format!("{name}.{of}x2 %r0, ?{list};").replace('?', "%r");
            let both = half_cases(11)
                .into_iter()
                .map(|[a, b, c]| [a | c << 16, b | a << 16, c | b << 16]);
            compare(&body, ["%r1", "%r2", "%r3"], "%r0", both, |all| {
                result(all) | result(all.map(|one| one >> 16)) << 16
            });
        }
    }
    // The reference is the half crate, which has its own arithmetic.
    let names = ["%h1", "%h2"];
    let pairs = || half_cases(12).into_iter().map(|[a, b, _]| [a, b]);
    compare("add.f16 %h0, %h1, %h2;", names, "%h0", pairs(), |[a, b]| {
        let sum = f16::from_bits(a as u16) + f16::from_bits(b as u16);
        if sum.is_nan() {
            0x7fff
        } else {
            sum.to_bits().into()
        }
    });
    compare(
        "mul.bf16 %h0, %h1, %h2;",
        names,
        "%h0",
        pairs(),
        |[a, b]| {
            let exact = bf16::from_bits(a as u16).to_f64() * bf16::from_bits(b as u16).to_f64();
            if exact.is_nan() {
                0x7fff
            } else {
                BF16.encode(F64.decode(exact.to_bits()), Mode::Nearest, false)
            }
        },
    );
}

#[test]
fn halves_with_modifiers() {
    let names = ["%h1", "%h2", "%h3"];
    let flush = |bits: u64| {
        if bits & 0x7c00 == 0 {
            bits & 0x8000
        } else {
            bits
        }
    };
    let fma = |format: Format, all: [u64; 3]| {
        let [a, b, c] = all.map(|one| format.decode(one));
        format.encode(add(multiply(a, b), c, Mode::Nearest), Mode::Nearest, false)
    };
    let number = |bits: u64| f16::from_bits(bits as u16).to_f32();
    compare(
        "fma.rn.ftz.f16 %h0, %h1, %h2, %h3;",
        names,
        "%h0",
        half_cases(13),
        |all| flush(fma(F16, all.map(flush))),
    );
    compare(
        "fma.rn.sat.f16 %h0, %h1, %h2, %h3;",
        names,
        "%h0",
        half_cases(13),
        |all| {
            let result = fma(F16, all);
            match number(result) {
                one if one > 1.0 => 0x3c00,
                one if one > 0.0 => result,
                _ => 0,
            }
        },
    );
    for (of, format, nan) in [("f16", F16, 0x7c00), ("bf16", BF16, 0x7f80)] {
        let body = format!("fma.rn.relu.{of} %h0, %h1, %h2, %h3;");
        compare(&body, names, "%h0", half_cases(13), |all| {
            match fma(format, all) {
                result if result & 0x7fff > nan => 0x7fff,
                result if result & 0x8000 != 0 => 0,
                result => result,
            }
        });
    }
    let two = ["%h1", "%h2"];
    let pairs = || half_cases(14).into_iter().map(|[a, b, _]| [a, b]);
    for (name, greater) in [("min", false), ("max", true)] {
        for (modifier, nan) in [("", false), (".NaN", true)] {
            for (of, top) in [("f16", 0x7c00), ("bf16", 0x7f80)] {
                let body = format!("{name}{modifier}.{of} %h0, %h1, %h2;");
                compare(&body, two, "%h0", pairs(), |[a, b]| {
                    let is_nan = |bits: u64| bits & 0x7fff > top;
                    // Keys in the order of the codes. Negative codes are reversed.
                    let key = |bits: u64| {
                        if bits & 0x8000 != 0 {
                            !(bits as i64)
                        } else {
                            bits as i64 | 0x8000
                        }
                    };
                    match (is_nan(a), is_nan(b)) {
                        (true, true) => 0x7fff,
                        (true, _) | (_, true) if nan => 0x7fff,
                        (true, _) => b,
                        (_, true) => a,
                        _ if (key(a) > key(b)) == greater => a,
                        _ => b,
                    }
                });
            }
        }
    }
    refusal("add.ftz.bf16 %h0, %h1, %h2;");
    refusal("add.rz.f16 %h0, %h1, %h2;");
    refusal("add.f16 %h0, %h1, 1.0;");
    refusal("div.f16 %h0, %h1, %h2;");
}
