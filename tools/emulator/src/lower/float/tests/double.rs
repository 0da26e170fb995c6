use super::*;

fn double_cases(seed: u64) -> Vec<[u64; 3]> {
    let edges = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f64::INFINITY,
        f64::NAN,
        f64::MAX,
        -f64::MAX,
        f64::MIN_POSITIVE,
        5e-324,
        -5e-324,
        1e-160,
        3.0,
    ];
    let mut random = Random::new(seed);
    let some = |random: &mut Random| match random.next() % 4 {
        0 => edges[random.next() as usize % edges.len()].to_bits(),
        _ => random.double().to_bits(),
    };
    (0..8000)
        .map(|_| [0; 3].map(|_: u64| some(&mut random)))
        .collect()
}

#[test]
fn f64_in_each_rounding() {
    let canonical = |number: f64| {
        if number.is_nan() {
            0xfff8_0000_0000_0000
        } else {
            number.to_bits()
        }
    };
    type Function = fn([f64; 3]) -> f64;
    type Exact = fn([ExactNumber; 3], Mode) -> ExactNumber;
    for (name, list, near, exact) in [
        (
            "add",
            "%d1, %d2",
            (|[a, b, _]| a + b) as Function,
            (|[a, b, _], mode| add(a, b, mode)) as Exact,
        ),
        (
            "sub",
            "%d1, %d2",
            |[a, b, _]| a - b,
            |[a, b, _], mode| add(a, b.negated(), mode),
        ),
        (
            "mul",
            "%d1, %d2",
            |[a, b, _]| a * b,
            |[a, b, _], _| multiply(a, b),
        ),
        (
            "div",
            "%d1, %d2",
            |[a, b, _]| a / b,
            |[a, b, _], _| divide(a, b),
        ),
        (
            "fma",
            "%d1, %d2, %d3",
            |[a, b, c]| a.mul_add(b, c),
            |[a, b, c], mode| add(multiply(a, b), c, mode),
        ),
    ] {
        let names = ["%d1", "%d2", "%d3"];
        let of = |rounding: &str| format!("{name}.{rounding}.f64 %d0, {list};");
        compare(&of("rn"), names, "%d0", double_cases(8), |all| {
            canonical(near(all.map(f64::from_bits)))
        });
        for (rounding, mode) in MODES {
            compare(&of(rounding), names, "%d0", double_cases(9), |all| {
                let nearest = near(all.map(f64::from_bits));
                let result = F64.encode(exact(all.map(|one| F64.decode(one)), mode), mode, false);
                let number = f64::from_bits(result);
                // At most one step from the nearest number, on the side of the rounding.
                assert!(nearest.is_nan() == number.is_nan());
                assert!(
                    nearest.is_nan()
                        || number == nearest
                        || number == nearest.next_up()
                        || number == nearest.next_down()
                );
                result
            });
        }
    }
    refusal("add.ftz.f64 %d0, %d1, %d2;");
}
