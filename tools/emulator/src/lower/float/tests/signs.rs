use super::*;

/// Returns the minimum or the maximum in the order of `total_cmp`, where -0 is below 0. NaNs are handled separately.
fn extreme(a: f32, b: f32, greater: bool, nan: bool) -> u64 {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => NAN,
        (true, _) | (_, true) if nan => NAN,
        (true, _) => bits(b),
        (_, true) => bits(a),
        _ if (a.total_cmp(&b) == std::cmp::Ordering::Greater) == greater => bits(a),
        _ => bits(b),
    }
}

#[test]
fn lesser_and_greater() {
    let names = ["%f1", "%f2"];
    let cases = || single_cases(5).into_iter().map(|[a, b, _]| [a, b]);
    for (name, greater) in [("min", false), ("max", true)] {
        for (modifier, nan, ftz) in [
            ("", false, false),
            (".NaN", true, false),
            (".ftz", false, true),
            (".ftz.NaN", true, true),
        ] {
            let body = format!("{name}{modifier}.f32 %f0, %f1, %f2;");
            let of = |one| {
                if ftz {
                    flushed(single(one))
                } else {
                    single(one)
                }
            };
            compare(&body, names, "%f0", cases(), |[a, b]| {
                extreme(of(a), of(b), greater, nan)
            });
        }
        let body = format!("{name}.NaN.f32 %f0, %f1, %f2, %f3;");
        compare(
            &body,
            ["%f1", "%f2", "%f3"],
            "%f0",
            single_cases(6),
            |[a, b, c]| {
                extreme(
                    single(extreme(single(a), single(b), greater, true)),
                    single(c),
                    greater,
                    true,
                )
            },
        );
        let body = format!("{name}.xorsign.abs.f32 %f0, %f1, %f2;");
        let numbers = cases().filter(|pair| pair.iter().all(|one| !single(*one).is_nan()));
        compare(&body, names, "%f0", numbers, |[a, b]| {
            extreme(single(a).abs(), single(b).abs(), greater, false) | (a ^ b) & 0x8000_0000
        });
        let body = format!("{name}.f64 %d0, %d1, %d2;");
        let doubles = cases().map(|pair| pair.map(|one| f64::from(single(one)).to_bits()));
        compare(&body, ["%d1", "%d2"], "%d0", doubles, |pair| {
            let [a, b] = pair.map(|one| f64::from_bits(one) as f32);
            match extreme(a, b, greater, false) {
                NAN => 0xfff8_0000_0000_0000,
                one => f64::from(single(one)).to_bits(),
            }
        });
    }
}

#[test]
fn signs_and_classes() {
    let cases = || single_cases(7).into_iter().map(|[a, b, _]| [a, b]);
    let one = || cases().map(|[a, _]| [a]);
    compare("neg.f32 %f0, %f1;", ["%f1"], "%f0", one(), |[a]| {
        a ^ 0x8000_0000
    });
    compare("abs.f32 %f0, %f1;", ["%f1"], "%f0", one(), |[a]| {
        a & 0x7fff_ffff
    });
    let numbers = || one().filter(|[a]| !single(*a).is_nan());
    compare("neg.ftz.f32 %f0, %f1;", ["%f1"], "%f0", numbers(), |[a]| {
        bits(-flushed(single(a)))
    });
    compare("abs.ftz.f32 %f0, %f1;", ["%f1"], "%f0", numbers(), |[a]| {
        bits(flushed(single(a)).abs())
    });
    compare("neg.f64 %d0, %d1;", ["%d1"], "%d0", one(), |[a]| {
        a ^ 1 << 63
    });
    compare("abs.bf16x2 %r0, %r1;", ["%r1"], "%r0", one(), |[a]| {
        a & 0x7fff_7fff
    });
    compare(
        "neg.f16 %h0, %h1;",
        ["%h1"],
        "%h0",
        [[0], [0x8001], [0x7c00]],
        |[a]| a ^ 0x8000,
    );
    compare(
        "neg.ftz.f16x2 %r0, %r1;",
        ["%r1"],
        "%r0",
        [[0x83ff_0400], [0x0001_8000]],
        |[a]| {
            if a == 0x83ff_0400 {
                0x0000_8400
            } else {
                0x8000_0000
            }
        },
    );
    // The first operand gives the sign.
    compare(
        "copysign.f32 %f0, %f1, %f2;",
        ["%f1", "%f2"],
        "%f0",
        cases(),
        |[a, b]| u64::from(f32::copysign(single(b), single(a)).to_bits()),
    );
    type Class = fn(f64) -> bool;
    for (name, single_class, double_class) in [
        (
            "finite",
            (|a| a.is_finite()) as Class,
            (|a| a.is_finite()) as Class,
        ),
        ("infinite", |a| a.is_infinite(), |a| a.is_infinite()),
        ("number", |a| !a.is_nan(), |a| !a.is_nan()),
        ("notanumber", |a| a.is_nan(), |a| a.is_nan()),
        ("normal", |a| (a as f32).is_normal(), |a| a.is_normal()),
        (
            "subnormal",
            |a| (a as f32).is_subnormal(),
            |a| a.is_subnormal(),
        ),
    ] {
        let body = format!("testp.{name}.f32 %p0, %f1;");
        compare(&body, ["%f1"], "%p0", one(), |[a]| {
            single_class(single(a).into()).into()
        });
        let body = format!("testp.{name}.f64 %p0, %d1;");
        let doubles = [
            0.0,
            -1.0,
            5e-324,
            f64::MIN_POSITIVE,
            f64::MAX,
            -f64::INFINITY,
            f64::NAN,
        ]
        .map(|one| [one.to_bits()]);
        compare(&body, ["%d1"], "%p0", doubles, |[a]| {
            double_class(f64::from_bits(a)).into()
        });
    }
}
