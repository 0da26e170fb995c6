use super::*;

#[test]
fn f32_to_nearest() {
    let names = ["%f1", "%f2", "%f3"];
    type Function = fn([f32; 3]) -> f32;
    for (name, operands, expected) in [
        ("add?.f32", 2, (|[a, b, _]| a + b) as Function),
        ("sub.rn?.f32", 2, |[a, b, _]| a - b),
        ("mul?.f32", 2, |[a, b, _]| a * b),
        ("fma.rn?.f32", 3, |[a, b, c]| a.mul_add(b, c)),
        ("mad.rn?.f32", 3, |[a, b, c]| a.mul_add(b, c)),
    ] {
        let list = ["%f1, %f2", "%f1, %f2, %f3"][operands - 2];
        for (ftz, sat) in [(false, false), (true, false), (false, true), (true, true)] {
            let modifiers =
                [["", ".sat"], [".ftz", ".ftz.sat"]][usize::from(ftz)][usize::from(sat)];
            let body = format!("{} %f0, {list};", name.replace('?', modifiers));
            compare(&body, names, "%f0", single_cases(1), |all| {
                let all = all.map(|one| {
                    if ftz {
                        flushed(single(one))
                    } else {
                        single(one)
                    }
                });
                let result = expected(all);
                let result = if ftz { flushed(result) } else { result };
                bits(if sat { saturated(result) } else { result })
            });
        }
    }
    for name in ["div.rn", "div.full"] {
        let body = format!("{name}.f32 %f0, %f1, %f2;");
        compare(&body, names, "%f0", single_cases(2), |[a, b, _]| {
            bits(single(a) / single(b))
        });
        let body = format!("{name}.ftz.f32 %f0, %f1, %f2;");
        compare(&body, names, "%f0", single_cases(2), |[a, b, _]| {
            bits(flushed(flushed(single(a)) / flushed(single(b))))
        });
    }
}

/// Checks that a number is the rounding of an exact value in this mode. It compares only the neighbours of the
/// number.
fn is_rounded(exact: f64, rest: f64, result: f32, mode: Mode) -> bool {
    // The exact value is exact + rest. The rest is less than half a unit of exact.
    let compare = |number: f32| {
        let number = f64::from(number);
        match exact.partial_cmp(&number) {
            Some(std::cmp::Ordering::Equal) => 0.0f64.partial_cmp(&-rest),
            other => other,
        }
    };
    use std::cmp::Ordering::{Equal, Greater, Less};
    let (here, up, down) = (
        compare(result),
        compare(result.next_up()),
        compare(result.next_down()),
    );
    let mode = match mode {
        Mode::Zero if exact > 0.0 => Mode::Down,
        Mode::Zero => Mode::Up,
        other => other,
    };
    match mode {
        Mode::Down => matches!(here, Some(Greater | Equal)) && up == Some(Less),
        _ => matches!(here, Some(Less | Equal)) && down == Some(Greater),
    }
}

#[test]
fn f32_directed_sums_and_products_are_neighbours() {
    let mut random = Random::new(3);
    let cases: Vec<_> = (0..20_000)
        .map(|_| [random.single(), random.single()])
        .filter(|[a, b]| a.is_finite() && b.is_finite())
        .collect();
    for (name, mode) in MODES {
        for (operation, product) in [("add", false), ("mul", true)] {
            let body = format!("{operation}.{name}.f32 %f0, %f1, %f2;");
            let evaluate = crate::testing::registers(&body, ["%f0"]);
            for cases in cases.chunks_exact(32) {
                let lanes = |which: usize| {
                    std::array::from_fn(|lane| u64::from(cases[lane][which].to_bits()))
                };
                let [results] = evaluate(&[("%f1", &lanes(0)), ("%f2", &lanes(1))]);
                for ([a, b], result) in cases.iter().zip(results) {
                    let [x, y] = [a, b].map(|one| f64::from(*one));
                    let (exact, rest) = if product {
                        (x * y, 0.0)
                    } else {
                        let (large, small) = if x.abs() < y.abs() { (y, x) } else { (x, y) };
                        (large + small, small - ((large + small) - large))
                    };
                    // For an exact zero, only the sign matters. It is checked below.
                    if exact == 0.0 || exact.abs() > f32::MAX.into() {
                        continue;
                    }
                    assert!(
                        is_rounded(exact, rest, single(result), mode),
                        "{body} of {a:e} and {b:e} is {:e}",
                        single(result)
                    );
                }
            }
        }
    }
}

#[test]
fn f32_directed_as_whole_numbers_say() {
    let names = ["%f1", "%f2", "%f3"];
    type Function = fn([ExactNumber; 3], Mode) -> ExactNumber;
    for (mode_name, mode) in MODES {
        for (name, list, expected) in [
            (
                "add",
                "%f1, %f2",
                (|[a, b, _], mode| add(a, b, mode)) as Function,
            ),
            ("sub", "%f1, %f2", |[a, b, _], mode| {
                add(a, b.negated(), mode)
            }),
            ("mul", "%f1, %f2", |[a, b, _], _| multiply(a, b)),
            ("fma", "%f1, %f2, %f3", |[a, b, c], mode| {
                add(multiply(a, b), c, mode)
            }),
            ("div", "%f1, %f2", |[a, b, _], _| divide(a, b)),
        ] {
            for ftz in [false, true] {
                let modifier = if ftz { ".ftz" } else { "" };
                let body = format!("{name}.{mode_name}{modifier}.f32 %f0, {list};");
                compare(&body, names, "%f0", single_cases(4), |all| {
                    let all = all.map(|one| if ftz { bits(flushed(single(one))) } else { one });
                    let exact = expected(all.map(|one| F32.decode(one)), mode);
                    let result = F32.encode(exact, mode, false);
                    if ftz {
                        bits(flushed(single(result)))
                    } else {
                        result
                    }
                });
            }
        }
    }
}

#[test]
fn directed_sums_have_the_signs_and_bounds_of_their_rounding() {
    let code = |number: f32| u64::from(number.to_bits());
    let max = f32::MAX;
    let tiny = f32::from_bits(1);
    let cases: [(&str, [f32; 2], f32); 14] = [
        ("add.rm", [1.0, -1.0], -0.0),
        ("add.rz", [1.0, -1.0], 0.0),
        ("add.rp", [-0.0, 0.0], 0.0),
        ("add.rm", [-0.0, 0.0], -0.0),
        ("add.rm", [0.0, 0.0], 0.0),
        ("add.rp", [-0.0, -0.0], -0.0),
        ("mul.rz", [max, max], max),
        ("mul.rm", [max, -max], f32::NEG_INFINITY),
        ("mul.rp", [max, -max], -max),
        ("mul.rp", [tiny, tiny], tiny),
        ("mul.rm", [tiny, tiny], 0.0),
        ("mul.rm", [tiny, -tiny], -tiny),
        ("add.rp", [1.0, tiny], 1.0f32.next_up()),
        ("sub.rz", [1.0, tiny], 1.0f32.next_down()),
    ];
    for (name, pair, expected) in cases {
        let body = format!("{name}.f32 %f0, %f1, %f2;");
        compare(&body, ["%f1", "%f2"], "%f0", [pair.map(code)], |_| {
            code(expected)
        });
        let body = format!("{name}.f64 %d0, %d1, %d2;");
        // The same signs in f64, whose range is different.
        if expected == 0.0 && pair[0] != tiny {
            let pair = pair.map(|one| f64::from(one).to_bits());
            compare(&body, ["%d1", "%d2"], "%d0", [pair], |_| {
                f64::from(expected).to_bits()
            });
        }
    }
}

#[test]
fn division_by_approximation_has_its_gap() {
    let names = ["%f1", "%f2"];
    let code = |number: f32| u64::from(number.to_bits());
    for (a, b, expected) in [
        (1.0, 3.0, 1.0 / 3.0),
        (6.0, -2.0, -3.0),
        (1.0, 2f32.powi(126), 2f32.powi(-126)),
        (f32::MAX, 1.5 * 2f32.powi(126), 0.0),
        (f32::MAX, -1.5 * 2f32.powi(126), -0.0),
        (1.0, 0.0, f32::INFINITY),
        (1.0, f32::INFINITY, 0.0),
    ] {
        compare(
            "div.approx.f32 %f0, %f1, %f2;",
            names,
            "%f0",
            [[code(a), code(b)]],
            |_| code(expected),
        );
    }
    let nan = [[code(f32::INFINITY), code(f32::MAX)]];
    compare(
        "div.approx.ftz.f32 %f0, %f1, %f2;",
        names,
        "%f0",
        nan,
        |_| NAN,
    );
}

#[test]
fn pairs_of_f32() {
    let both = |a: u64, b: u64| a | b << 32;
    let cases = || {
        single_cases(15)
            .into_iter()
            .map(|[a, b, c]| [both(a, b), both(b, c), both(c, a)])
    };
    let names = ["%d1", "%d2", "%d3"];
    let halves = |all: [u64; 3], function: &dyn Fn([f32; 3]) -> f32| {
        let of = |shift: u32| bits(function(all.map(|one| single(one >> shift))));
        both(of(0), of(32))
    };
    compare(
        "fma.rn.f32x2 %d0, %d1, %d2, %d3;",
        names,
        "%d0",
        cases(),
        |all| halves(all, &|[a, b, c]| a.mul_add(b, c)),
    );
    compare("add.f32x2 %d0, %d1, %d2;", names, "%d0", cases(), |all| {
        halves(all, &|[a, b, _]| a + b)
    });
    compare(
        "mul.rn.ftz.f32x2 %d0, %d1, %d2;",
        names,
        "%d0",
        cases(),
        |all| halves(all, &|[a, b, _]| flushed(flushed(a) * flushed(b))),
    );
    compare(
        "sub.rz.f32x2 %d0, %d1, %d2;",
        names,
        "%d0",
        cases(),
        |all| {
            halves(all, &|[a, b, _]| {
                let [a, b] = [a, b].map(|one| F32.decode(one.to_bits().into()));
                single(F32.encode(add(a, b.negated(), Mode::Zero), Mode::Zero, false))
            })
        },
    );
}
