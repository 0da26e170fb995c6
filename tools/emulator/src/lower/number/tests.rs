use half::{bf16, f16};

use super::exact::{add, divide, multiply, square_root};
use super::*;
use crate::testing::{Random, singles};

const MODES: [Mode; 4] = [Mode::Nearest, Mode::Zero, Mode::Down, Mode::Up];

#[test]
fn formats_hold_what_the_host_does() {
    for bits in 0..=u64::from(u16::MAX) {
        let (half, brain) = (f16::from_bits(bits as u16), bf16::from_bits(bits as u16));
        for (format, value) in [(F16, half.to_f64()), (BF16, brain.to_f64())] {
            let real = format.decode(bits);
            assert_eq!(real == ExactNumber::Nan, value.is_nan());
            if value.is_nan() {
                continue;
            }
            assert_eq!(F64.encode(real, Mode::Nearest, false), value.to_bits());
            assert_eq!(real, F64.decode(value.to_bits()).rescaled(real));
            for mode in MODES {
                assert_eq!(format.encode(real, mode, false), bits);
            }
        }
        if !half.is_nan() {
            assert_eq!(quick::from_f16(bits).to_bits(), half.to_f32().to_bits());
            assert_eq!(quick::to_f16(half.to_f32()), bits);
        }
        if !brain.is_nan() {
            assert_eq!(quick::to_bf16(quick::from_bf16(bits)), bits);
        }
    }
    assert_eq!(quick::from_f16(0x7c01).to_bits(), 0x7fff_ffff);
    assert_eq!(quick::to_f16(f32::NAN), 0x7fff);
    assert_eq!(quick::to_bf16(-f32::NAN), 0x7fff);
}

impl ExactNumber {
    /// Returns the same number with the exponent of another number.
    fn rescaled(self, like: Self) -> Self {
        match (self, like) {
            (
                Self::Finite {
                    negative,
                    mantissa,
                    exponent,
                },
                Self::Finite { exponent: to, .. },
            ) => Self::Finite {
                negative,
                mantissa: match to - exponent {
                    down @ 0.. => mantissa.checked_shr(down as u32).unwrap_or(0),
                    up => mantissa << -up,
                },
                exponent: to,
            },
            _ => self,
        }
    }
}

#[test]
fn narrowing_rounds_to_nearest() {
    let mut random = Random::new(1);
    for number in singles()
        .into_iter()
        .chain((0..200_000).map(|_| random.single()))
    {
        if number.is_nan() {
            continue;
        }
        let real = F32.decode(number.to_bits().into());
        let (half, brain) = (f16::from_f32(number), bf16::from_f32(number));
        assert_eq!(
            quick::to_f16(number),
            u64::from(half.to_bits()),
            "{number:e}"
        );
        assert_eq!(
            quick::to_bf16(number),
            u64::from(brain.to_bits()),
            "{number:e}"
        );
        assert_eq!(
            F16.encode(real, Mode::Nearest, false),
            u64::from(half.to_bits())
        );
        assert_eq!(
            BF16.encode(real, Mode::Nearest, false),
            u64::from(brain.to_bits())
        );
    }
}

/// Checks that directed rounding selects the neighbour on its side.
#[test]
fn directed_roundings_take_the_neighbour_on_their_side() {
    let mut random = Random::new(2);
    for _ in 0..100_000 {
        let number = random.double();
        if number.is_nan() {
            continue;
        }
        let real = F64.decode(number.to_bits());
        let rounded = |mode| f32::from_bits(F32.encode(real, mode, false) as u32);
        let [near, zero, down, up] = MODES.map(rounded);
        assert_eq!(near.to_bits(), (number as f32).to_bits());
        assert!(f64::from(down) <= number && number <= f64::from(up));
        assert!(down.to_bits() == up.to_bits() || down.next_up() == up);
        assert_eq!(
            zero.to_bits(),
            if number < 0.0 { up } else { down }.to_bits()
        );
        for mode in MODES {
            assert_eq!(
                quick::single(number, mode).to_bits(),
                rounded(mode).to_bits()
            );
        }
        let odd = quick::odd_single(number).to_bits();
        assert!(odd == near.to_bits() || odd & 1 == 1);
        assert!(odd == down.to_bits() || odd == up.to_bits());
    }
}

#[test]
fn exact_operations_round_as_the_host_does() {
    let mut random = Random::new(3);
    let near = |real| F64.encode(real, Mode::Nearest, false);
    let same = |real, host: f64, what: &str| assert_eq!(near(real), quick::bits64(host), "{what}");
    let special = [
        0.0,
        -0.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        f64::MIN_POSITIVE,
        5e-324,
        f64::MAX,
        -1.0,
    ];
    let mut pick = move || match random.next() % 8 {
        0 => special[random.next() as usize % special.len()],
        // Numbers close to each other, which cancel.
        1..4 => f64::from_bits(1.0f64.to_bits() ^ (random.next() & 0x8030_0000_0000_001f)),
        _ => random.double(),
    };
    for _ in 0..200_000 {
        let [a, b, c] = [pick(), pick(), pick()];
        let [x, y, z] = [a, b, c].map(|number| F64.decode(number.to_bits()));
        same(add(x, y, Mode::Nearest), a + b, "add");
        same(multiply(x, y), a * b, "multiply");
        same(divide(x, y), a / b, "divide");
        same(square_root(x), a.sqrt(), "root");
        same(
            add(multiply(x, y), z, Mode::Nearest),
            a.mul_add(b, c),
            "fma",
        );
    }
}

#[test]
fn odd_sums_round_once() {
    let mut random = Random::new(4);
    for _ in 0..200_000 {
        let [a, b] = [random.single(), random.single()].map(f64::from);
        let c = f64::from(random.single()) * a;
        for (a, b) in [(a, b), (a * b, c), (a, f64::from((a * 1e-3) as f32))] {
            let exact = add(
                F64.decode(a.to_bits()),
                F64.decode(b.to_bits()),
                Mode::Nearest,
            );
            let once = F32.encode(exact, Mode::Nearest, false);
            assert_eq!(
                quick::bits(quick::odd_sum(a, b) as f32),
                once,
                "{a:e} + {b:e}"
            );
            let half = BF16.encode(exact, Mode::Nearest, false);
            let twice = quick::to_bf16(quick::odd_single(quick::odd_sum(a, b)));
            assert_eq!(twice, half, "{a:e} + {b:e}");
        }
    }
}

#[test]
fn powers_of_two_are_near() {
    let mut random = Random::new(5);
    for _ in 0..100_000 {
        let number = (random.next() as i64 as f64) * 2f64.powi(-56);
        let (result, expected) = (quick::exp2(number), number.exp2());
        assert!(
            (result / expected - 1.0).abs() < 1e-15,
            "{number}: {result:e}"
        );
    }
    for whole in -149..=128 {
        assert_eq!(quick::exp2(f64::from(whole)), 2f64.powi(whole));
    }
    assert_eq!(quick::exp2(f64::INFINITY) as f32, f32::INFINITY);
    assert_eq!(quick::exp2(f64::NEG_INFINITY) as f32, 0.0);
    assert!(quick::exp2(f64::NAN).is_nan());
}

#[test]
fn eight_bits_and_fewer_are_what_their_tables_say() {
    let value = |format: Format, bits| {
        f64::from_bits(F64.encode(format.decode(bits), Mode::Nearest, false))
    };
    assert_eq!(value(E4M3, 0x7e), 448.0);
    assert!(value(E4M3, 0x7f).is_nan() && value(E4M3, 0xff).is_nan());
    assert_eq!(value(E4M3, 0x01), 2f64.powi(-9));
    assert_eq!(value(E5M2, 0x7b), 57344.0);
    assert_eq!(value(E5M2, 0xfc), f64::NEG_INFINITY);
    assert_eq!(value(E5M2, 0x01), 2f64.powi(-16));
    let four: Vec<_> = (0..8).map(|bits| value(E2M1, bits)).collect();
    assert_eq!(four, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    assert_eq!((value(E2M3, 0x1f), value(E2M3, 0x21)), (7.5, -0.125));
    assert_eq!((value(E3M2, 0x1f), value(E3M2, 0x01)), (28.0, 0.0625));
    let code = |format: Format, number: f64, saturate| {
        format.encode(F64.decode(number.to_bits()), Mode::Nearest, saturate)
    };
    assert_eq!(code(E4M3, -1e9, true), 0xfe);
    assert_eq!(code(E4M3, 464.0, true), 0x7e);
    assert_eq!(code(E4M3, f64::INFINITY, true), 0x7e);
    assert_eq!(code(E4M3, f64::NAN, true), 0x7f);
    assert_eq!(code(E5M2, f64::INFINITY, true), 0x7b);
    assert_eq!(code(E2M1, f64::NAN, true), 7);
    assert_eq!(code(E2M1, -f64::INFINITY, true), 0xf);
}
