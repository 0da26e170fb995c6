use half::{bf16, f16};

use crate::lower::number::exact::{add, multiply};
use crate::lower::number::{BF16, ExactNumber, F16, F64, Mode};
use crate::testing::{Random, compare, refusal, registers, singles};

const NAN: u64 = 0x7fff_ffff;

fn bits(number: f32) -> u64 {
    if number.is_nan() {
        NAN
    } else {
        number.to_bits().into()
    }
}

fn flushed(number: f32) -> f32 {
    if number.is_subnormal() {
        0f32.copysign(number)
    } else {
        number
    }
}

fn cases(seed: u64) -> Vec<[u64; 1]> {
    let mut random = Random::new(seed);
    let more = (0..4000).map(|_| random.single());
    singles()
        .into_iter()
        .chain(more)
        .map(|one| [one.to_bits().into()])
        .collect()
}

#[test]
fn functions_are_those_of_f64() {
    type Function = fn(f64) -> f64;
    for (name, expected) in [
        ("rcp", (|a| 1.0 / a) as Function),
        ("sqrt", f64::sqrt),
        ("rsqrt", |a| 1.0 / a.sqrt()),
        ("ex2", f64::exp2),
        ("lg2", f64::log2),
        ("sin", f64::sin),
        ("cos", f64::cos),
    ] {
        // The host functions may differ in the last place.
        let near = |result: f32, expected: f32| {
            bits(result) == bits(expected) || bits(result).abs_diff(bits(expected)) == 1
        };
        for ftz in [false, true] {
            let modifier = if ftz { ".ftz" } else { "" };
            let body = format!("{name}.approx{modifier}.f32 %f0, %f1;");
            let evaluate = registers(&body, ["%f0"]);
            for cases in cases(1).chunks_exact(32) {
                let lanes = std::array::from_fn(|lane| cases[lane][0]);
                let [results] = evaluate(&[("%f1", &lanes)]);
                for (a, result) in lanes.into_iter().zip(results) {
                    let a = f32::from_bits(a as u32);
                    let a = if ftz { flushed(a) } else { a };
                    let result = f32::from_bits(result as u32);
                    let expected = expected(a.into()) as f32;
                    let expected = if ftz { flushed(expected) } else { expected };
                    assert!(
                        near(result, expected),
                        "{body} of {a:e} is {result:e}, not {expected:e}"
                    );
                }
            }
        }
    }
    refusal("rcp.f32 %f0, %f1;");
    refusal("sin.f32 %f0, %f1;");
    refusal("ex2.approx.f64 %d0, %d1;");
    refusal("tanh.approx.ftz.f32 %f0, %f1;");
    refusal("sin.approx.f16 %h0, %h1;");
}

#[test]
fn at_the_edges_they_are_what_the_manual_says() {
    let code = |number: f32| u64::from(number.to_bits());
    let infinity = f32::INFINITY;
    for (name, a, expected) in [
        ("rcp.approx", -0.0, -infinity),
        ("rcp.approx", -infinity, -0.0),
        ("rsqrt.approx", 0.0, infinity),
        ("rsqrt.approx", -0.0, -infinity),
        ("rsqrt.approx", -1.0, f32::NAN),
        ("sqrt.approx", -0.0, -0.0),
        ("sqrt.rn", -1.0, f32::NAN),
        ("ex2.approx", -infinity, 0.0),
        ("ex2.approx", 3.0, 8.0),
        ("ex2.approx", -149.0, f32::from_bits(1)),
        ("ex2.approx.ftz", -149.0, 0.0),
        ("lg2.approx", 0.0, -infinity),
        ("lg2.approx", -1.0, f32::NAN),
        ("lg2.approx", 8.0, 3.0),
        ("sin.approx", -0.0, -0.0),
        ("cos.approx", infinity, f32::NAN),
        ("tanh.approx", infinity, 1.0),
        ("tanh.approx", -0.0, -0.0),
    ] {
        compare(
            &format!("{name}.f32 %f0, %f1;"),
            ["%f1"],
            "%f0",
            [[code(a)]],
            |_| bits(expected),
        );
    }
}

#[test]
fn exact_ones_are_rounded_as_told() {
    let single = |bits: u64| f32::from_bits(bits as u32);
    compare("rcp.rn.f32 %f0, %f1;", ["%f1"], "%f0", cases(2), |[a]| {
        bits(1.0 / single(a))
    });
    compare(
        "rcp.rn.ftz.f32 %f0, %f1;",
        ["%f1"],
        "%f0",
        cases(2),
        |[a]| bits(flushed(1.0 / flushed(single(a)))),
    );
    compare("sqrt.rn.f32 %f0, %f1;", ["%f1"], "%f0", cases(3), |[a]| {
        bits(single(a).sqrt())
    });
    let doubles = |seed| {
        let mut random = Random::new(seed);
        (0..3000)
            .map(|_| [random.double().to_bits()])
            .collect::<Vec<_>>()
    };
    let canonical = |number: f64| {
        if number.is_nan() {
            0xfff8_0000_0000_0000
        } else {
            number.to_bits()
        }
    };
    compare("rcp.rn.f64 %d0, %d1;", ["%d1"], "%d0", doubles(4), |[a]| {
        canonical(1.0 / f64::from_bits(a))
    });
    compare(
        "sqrt.rn.f64 %d0, %d1;",
        ["%d1"],
        "%d0",
        doubles(5),
        |[a]| canonical(f64::from_bits(a).sqrt()),
    );
    // Directed rounding: the product with the operand approximates the number from one side only.
    for (mode, name) in [(Mode::Down, "rm"), (Mode::Up, "rp"), (Mode::Zero, "rz")] {
        for (operation, root) in [("rcp", false), ("sqrt", true)] {
            for (of, names) in [("f32", ["%f0", "%f1"]), ("f64", ["%d0", "%d1"])] {
                let body = format!("{operation}.{name}.{of} {}, {};", names[0], names[1]);
                let evaluate = registers(&body, [names[0]]);
                let inputs: Vec<f64> = match of {
                    "f32" => cases(6).iter().map(|[a]| single(*a).into()).collect(),
                    _ => doubles(7).iter().map(|[a]| f64::from_bits(*a)).collect(),
                };
                let inputs = inputs
                    .into_iter()
                    .filter(|a| a.is_finite() && *a > 1e-35 && *a < 1e35);
                let inputs: Vec<_> = inputs.collect();
                let number = |bits: u64| {
                    if of == "f32" {
                        single(bits).into()
                    } else {
                        f64::from_bits(bits)
                    }
                };
                for inputs in inputs.chunks_exact(32) {
                    let lanes = std::array::from_fn(|lane| match of {
                        "f32" => (inputs[lane] as f32).to_bits().into(),
                        _ => inputs[lane].to_bits(),
                    });
                    let [results] = evaluate(&[(names[1], &lanes)]);
                    for (a, result) in inputs.iter().zip(results) {
                        // The sign of result * other - whole, computed exactly.
                        let error = |bits: u64| {
                            let result = number(bits);
                            let (other, whole) = if root { (result, *a) } else { (*a, 1.0) };
                            let real = |number: f64| F64.decode(number.to_bits());
                            match add(multiply(real(result), real(other)), real(-whole), mode) {
                                ExactNumber::Finite { mantissa: 0, .. } => 0,
                                difference if difference.negative() => -1,
                                _ => 1,
                            }
                        };
                        let told = match mode {
                            Mode::Up => error(result) >= 0 && error(result - 1) < 0,
                            _ => error(result) <= 0 && error(result + 1) > 0,
                        };
                        assert!(told, "{body} of {a:e} is {:e}", number(result));
                    }
                }
            }
        }
    }
}

#[test]
fn halves() {
    let all = || (0..=0xffff_u64).map(|bits| [bits]);
    for (name, function) in [("ex2", f64::exp2 as fn(f64) -> f64), ("tanh", f64::tanh)] {
        let half = |bits: u64| {
            let number = function(f16::from_bits(bits as u16).to_f64());
            F16.encode(F64.decode(number.to_bits()), Mode::Nearest, false)
        };
        compare(
            &format!("{name}.approx.f16 %h0, %h1;"),
            ["%h1"],
            "%h0",
            all(),
            |[a]| half(a),
        );
        let pairs = all().map(|[a]| [a | (a ^ 0x1234) << 16]);
        compare(
            &format!("{name}.approx.f16x2 %r0, %r1;"),
            ["%r1"],
            "%r0",
            pairs,
            |[a]| half(a) | half(a >> 16) << 16,
        );
    }
    compare(
        "tanh.approx.bf16 %h0, %h1;",
        ["%h1"],
        "%h0",
        all(),
        |[a]| {
            let number = bf16::from_bits(a as u16).to_f64().tanh();
            BF16.encode(F64.decode(number.to_bits()), Mode::Nearest, false)
        },
    );
    let flush = |bits: u64| {
        if bits & 0x7f80 == 0 {
            bits & 0x8000
        } else {
            bits
        }
    };
    compare(
        "ex2.approx.ftz.bf16 %h0, %h1;",
        ["%h1"],
        "%h0",
        all(),
        |[a]| {
            let number = bf16::from_bits(flush(a) as u16).to_f64().exp2();
            flush(BF16.encode(F64.decode(number.to_bits()), Mode::Nearest, false))
        },
    );
    refusal("ex2.approx.bf16 %h0, %h1;");
}

#[test]
fn f64_by_halves_of_its_bits() {
    let upper = |number: f64| number.to_bits() & !0xffff_ffff;
    for (a, expected) in [
        (3.0, upper(1.0 / 3.0)),
        (-0.0, (-f64::INFINITY).to_bits()),
        (f64::INFINITY, 0),
        (5e-324, f64::INFINITY.to_bits()),
        (f64::MAX, 0),
        (f64::from_bits(0x7ff0_0000_0000_0001), 0xfff8_0000_0000_0000),
    ] {
        compare(
            "rcp.approx.ftz.f64 %d0, %d1;",
            ["%d1"],
            "%d0",
            [[a.to_bits()]],
            |_| expected,
        );
    }
    for (a, expected) in [
        (4.0f64, 0.5f64.to_bits()),
        (2.0, upper(0.5f64.sqrt())),
        (-1.0, 0xfff8_0000_0000_0000),
    ] {
        for name in ["rsqrt.approx.f64", "rsqrt.approx.ftz.f64"] {
            compare(
                &format!("{name} %d0, %d1;"),
                ["%d1"],
                "%d0",
                [[a.to_bits()]],
                |_| expected,
            );
        }
    }
    refusal("rcp.approx.f64 %d0, %d1;");
}
