use super::*;

#[test]
fn comparisons_of_whole_numbers() {
    type Compare = fn(&i128, &i128) -> bool;
    let names: [(&str, Compare); 6] = [
        ("eq", i128::eq),
        ("ne", i128::ne),
        ("lt", i128::lt),
        ("le", i128::le),
        ("gt", i128::gt),
        ("ge", i128::ge),
    ];
    for (of, width, signed, letter) in TYPES {
        let [a, b] = [1, 2].map(|number| format!("%{letter}{number}"));
        for (name, expected) in names {
            let body = format!("setp.{name}.{of} %p1|%p2, {a}, {b};");
            for (out, negated) in [("%p1", false), ("%p2", true)] {
                compare(&body, [&a, &b], out, cases(width), |pair| {
                    let [a, b] = pair.map(|number| value(number, width, signed));
                    u64::from(expected(&a, &b) != negated)
                });
            }
        }
    }
    for (name, expected) in [
        ("lo", i128::lt as Compare),
        ("ls", i128::le),
        ("hi", i128::gt),
        ("hs", i128::ge),
    ] {
        compare(
            &format!("setp.{name}.u32 %p1, %r1, %r2;"),
            ["%r1", "%r2"],
            "%p1",
            cases(32),
            |[a, b]| expected(&a.into(), &b.into()).into(),
        );
    }
    refusal("setp.lt.b32 %p1, %r1, %r2;");
    refusal("setp.ltu.s32 %p1, %r1, %r2;");
    refusal("setp.nan.s32 %p1, %r1, %r2;");
}

/// Returns pairs of f32 numbers in each order, including subnormal numbers, zeros and NaN.
fn float_cases() -> Vec<[u64; 2]> {
    let numbers = [
        0.0f32,
        -0.0,
        1.0,
        -1.5,
        f32::INFINITY,
        -f32::INFINITY,
        f32::NAN,
        f32::from_bits(1),
        1e-40,
        -1e-40,
    ];
    let bits = numbers.map(|number| u64::from(number.to_bits()));
    pairs(&bits, 0, &mut Random::new(0))
}

#[test]
fn comparisons_of_floating_point() {
    type Compare = fn(f64, f64) -> bool;
    let nan = |a: f64, b: f64| a.is_nan() || b.is_nan();
    let names: [(&str, Compare, bool); 14] = [
        ("eq", |a, b| a == b, false),
        ("ne", |a, b| a != b, false),
        ("lt", |a, b| a < b, false),
        ("le", |a, b| a <= b, false),
        ("gt", |a, b| a > b, false),
        ("ge", |a, b| a >= b, false),
        ("equ", |a, b| a == b, true),
        ("neu", |a, b| a != b, true),
        ("ltu", |a, b| a < b, true),
        ("leu", |a, b| a <= b, true),
        ("gtu", |a, b| a > b, true),
        ("geu", |a, b| a >= b, true),
        ("num", |_, _| true, false),
        ("nan", |_, _| false, true),
    ];
    for (name, compared, unordered) in names {
        let holds = |a: f64, b: f64| if nan(a, b) { unordered } else { compared(a, b) };
        let single = |bits: u64| f64::from(f32::from_bits(bits as u32));
        let flushed = |bits: u64| {
            if single(bits).abs() < 1e-38 {
                0.0
            } else {
                single(bits)
            }
        };
        compare(
            &format!("setp.{name}.f32 %p1, %f1, %f2;"),
            ["%f1", "%f2"],
            "%p1",
            float_cases(),
            |[a, b]| holds(single(a), single(b)).into(),
        );
        compare(
            &format!("setp.{name}.ftz.f32 %p1, %f1, %f2;"),
            ["%f1", "%f2"],
            "%p1",
            float_cases(),
            |[a, b]| holds(flushed(a), flushed(b)).into(),
        );
        let doubles: Vec<_> = float_cases()
            .into_iter()
            .map(|pair| pair.map(|one| single(one).to_bits()))
            .collect();
        compare(
            &format!("setp.{name}.f64 %p1, %d1, %d2;"),
            ["%d1", "%d2"],
            "%p1",
            doubles,
            |[a, b]| holds(f64::from_bits(a), f64::from_bits(b)).into(),
        );
        let brain = |bits: u64| half::bf16::from_bits(bits as u16).to_f64();
        let short = |bits: u64| half::f16::from_bits(bits as u16).to_f64();
        let codes = [
            0, 0x8000, 1, 0x8001, 0x3c00, 0x3f80, 0xbc00, 0x7c00, 0x7f80, 0xff80, 0x7fff, 0xffff,
            0x7c01,
        ];
        let halves = pairs(&codes, 0, &mut Random::new(0));
        for (of, number) in [("bf16", &brain as &dyn Fn(u64) -> f64), ("f16", &short)] {
            let body = format!("setp.{name}.{of} %p1, %h1, %h2;");
            compare(&body, ["%h1", "%h2"], "%p1", halves.clone(), |[a, b]| {
                holds(number(a), number(b)).into()
            });
            let both: Vec<_> = halves
                .iter()
                .map(|[a, b]| [a | b << 16, b | a << 16])
                .collect();
            let body = format!("setp.{name}.{of}x2 %p1|%p2, %r1, %r2;");
            for (out, shift) in [("%p1", 0), ("%p2", 16)] {
                compare(&body, ["%r1", "%r2"], out, both.clone(), |pair| {
                    let [a, b] = pair.map(|bits| number(bits >> shift & 0xffff));
                    holds(a, b).into()
                });
            }
            let one = if of == "bf16" { 0x3f80 } else { 0x3c00 };
            for (to, yes) in [(format!("{of}x2"), one), ("u32".into(), 0xffff)] {
                let body = format!("set.{name}.{to}.{of}x2 %r0, %r1, %r2;");
                compare(&body, ["%r1", "%r2"], "%r0", both.clone(), |[a, b]| {
                    [0, 16].into_iter().fold(0, |all, shift| {
                        let [a, b] = [a, b].map(|bits| number(bits >> shift & 0xffff));
                        all | if holds(a, b) { yes << shift } else { 0 }
                    })
                });
            }
        }
        for (to, yes) in [("u32", ONES[32]), ("s32", ONES[32]), ("f32", 0x3f80_0000)] {
            let body = format!("set.{name}.{to}.f32 %r0, %f1, %f2;");
            compare(&body, ["%f1", "%f2"], "%r0", float_cases(), |[a, b]| {
                if holds(single(a), single(b)) { yes } else { 0 }
            });
        }
    }
    compare(
        "setp.eq.ftz.f16 %p1, %h1, 0x0000;",
        ["%h1"],
        "%p1",
        [[1], [0x83ff], [0x400]],
        |[a]| u64::from(a & 0x7c00 == 0),
    );
    refusal("setp.lo.f32 %p1, %f1, %f2;");
}

#[test]
fn comparisons_are_combined_with_a_predicate() {
    type Combine = fn(bool, bool) -> bool;
    for (name, combined) in [
        ("and", (|a, b| a & b) as Combine),
        ("or", |a, b| a | b),
        ("xor", |a, b| a != b),
    ] {
        for (sign, negated) in [("", false), ("!", true)] {
            let cases = || (0..8u64).map(|bits| [bits & 1, 0, bits >> 1 & 1]);
            let names = ["%r1", "%r2", "%p3"];
            let body = format!("setp.ne.{name}.s32 %p1|%p2, %r1, %r2, {sign}%p3;");
            compare(&body, names, "%p1", cases(), |[a, b, p]| {
                combined(a != b, (p == 1) != negated).into()
            });
            compare(&body, names, "%p2", cases(), |[a, b, p]| {
                combined(a == b, (p == 1) != negated).into()
            });
            let body = format!("set.ne.{name}.u32.u32 %r0, %r1, %r2, {sign}%p3;");
            compare(&body, names, "%r0", cases(), |[a, b, p]| {
                if combined(a != b, (p == 1) != negated) {
                    ONES[32]
                } else {
                    0
                }
            });
        }
        let body = format!("{name}.pred %p0, %p1, %p2;");
        let cases = (0..4u64).map(|bits| [bits & 1, bits >> 1]);
        compare(&body, ["%p1", "%p2"], "%p0", cases, |[a, b]| {
            combined(a == 1, b == 1).into()
        });
    }
    compare("not.pred %p0, %p1;", ["%p1"], "%p0", [[0], [1]], |[a]| {
        1 - a
    });
    compare("mov.pred %p0, %p1;", ["%p1"], "%p0", [[0], [1]], |[a]| a);
    compare(
        "setp.eq.s32 _|%p0, %r1, 5;",
        ["%r1"],
        "%p0",
        [[5], [6]],
        |[a]| u64::from(a != 5),
    );
}

#[test]
fn selections() {
    for (of, width, letter) in [
        ("b16", 16, 'h'),
        ("u32", 32, 'r'),
        ("f32", 32, 'f'),
        ("s64", 64, 'd'),
        ("f64", 64, 'd'),
    ] {
        let [out, a, b] = [0, 1, 2].map(|number| format!("%{letter}{number}"));
        let cases = cases(width).into_iter().map(|[a, b]| [a, b, (a ^ b) & 1]);
        compare(
            &format!("selp.{of} {out}, {a}, {b}, %p1;"),
            [&a, &b, "%p1"],
            &out,
            cases,
            |[a, b, p]| {
                if p == 1 { a } else { b }
            },
        );
    }
    let names = ["%d1", "%d2", "%r3"];
    let cases = |thirds: &[u64]| thirds.iter().map(|c| [7, 9, *c]).collect::<Vec<_>>();
    let thirds = [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff];
    compare(
        "slct.u64.s32 %d0, %d1, %d2, %r3;",
        names,
        "%d0",
        cases(&thirds),
        |[a, b, c]| {
            if c as i32 >= 0 { a } else { b }
        },
    );
    let floats = [0.0f32, -0.0, 1.0, -1.0, f32::NAN, -1e-40].map(|number| number.to_bits().into());
    let names = ["%d1", "%d2", "%f3"];
    compare(
        "slct.b64.f32 %d0, %d1, %d2, %f3;",
        names,
        "%d0",
        cases(&floats),
        |[a, b, c]| {
            if f32::from_bits(c as u32) >= 0.0 {
                a
            } else {
                b
            }
        },
    );
    compare(
        "slct.ftz.f64.f32 %d0, %d1, %d2, %f3;",
        names,
        "%d0",
        cases(&floats),
        |[a, b, c]| {
            let c = f32::from_bits(c as u32);
            if c >= 0.0 || c == -1e-40 { a } else { b }
        },
    );
}

#[test]
fn lanes_that_do_not_run_keep_their_predicates() {
    let evaluate = registers(
        "setp.eq.s32 %p1|%p2, %r1, 7; @%p0 setp.eq.s32 %p1|%p2, %r1, 8;\n\
         @%p0 not.pred %p0, %p0;",
        ["%p0", "%p1", "%p2"],
    );
    let even: Lanes = std::array::from_fn(|lane| u64::from(lane % 2 == 0));
    let results = evaluate(&[("%r1", &[7; 32]), ("%p0", &even)]);
    for lane in 0..32 {
        let expected = if lane % 2 == 0 { [0, 0, 1] } else { [0, 1, 0] };
        assert_eq!(results.map(|one| one[lane]), expected, "lane {lane}");
    }
}
