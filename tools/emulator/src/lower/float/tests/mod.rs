mod double;
mod halves;
mod signs;
mod single;

use half::{bf16, f16};

use crate::lower::number::exact::{add, divide, multiply};
use crate::lower::number::{BF16, ExactNumber, F16, F32, F64, Format, Mode};
use crate::testing::{Random, compare, pairs, refusal, singles};

const NAN: u64 = 0x7fff_ffff;

fn single(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

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

fn saturated(number: f32) -> f32 {
    if number.is_nan() || number <= 0.0 {
        0.0
    } else {
        number.min(1.0)
    }
}

fn single_cases(seed: u64) -> Vec<[u64; 3]> {
    let edges: Vec<_> = singles()
        .into_iter()
        .map(|number| u64::from(number.to_bits()))
        .collect();
    let mut random = Random::new(seed);
    let some = |random: &mut Random| match random.next() % 3 {
        0 => edges[random.next() as usize % edges.len()],
        _ => random.single().to_bits().into(),
    };
    let mut cases: Vec<_> = (0..6000)
        .map(|_| [0; 3].map(|_: u64| some(&mut random)))
        .collect();
    // Sums that cancel exactly or nearly.
    cases.extend((0..2000).map(|_| {
        let [a, b] = [random.single(), random.single()];
        let product = -(a * b);
        [
            a,
            b,
            f32::from_bits(product.to_bits() ^ (random.next() & 1) as u32),
        ]
        .map(|one| one.to_bits().into())
    }));
    cases.extend(
        pairs(&edges[..12], 0, &mut random)
            .iter()
            .map(|[a, b]| [*a, *b, *a]),
    );
    cases
}

const MODES: [(&str, Mode); 3] = [("rz", Mode::Zero), ("rm", Mode::Down), ("rp", Mode::Up)];
