mod float;
mod integers;
mod short;

use half::{bf16, f16};

use crate::testing::{Random, compare, refusal, singles};

const NAN: u64 = 0x7fff_ffff;
const NAN64: u64 = 0xfff8_0000_0000_0000;

fn single(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn all_halves() -> impl Iterator<Item = [u64; 1]> {
    (0..=0xffff).map(|bits| [bits])
}

fn single_cases(seed: u64) -> Vec<[u64; 1]> {
    let mut random = Random::new(seed);
    let edges = singles().into_iter().map(|number| number.to_bits());
    let more = (0..20_000).map(|_| random.single().to_bits());
    edges.chain(more).map(|bits| [bits.into()]).collect()
}

fn double_cases(seed: u64) -> Vec<[u64; 1]> {
    let mut random = Random::new(seed);
    let edges = singles().into_iter().map(f64::from);
    let edges: Vec<_> = edges
        .flat_map(|number| [number, number.next_up(), number.next_down(), number * 1e200])
        .collect();
    let more = (0..10_000).map(|_| random.double());
    edges
        .into_iter()
        .chain(more)
        .map(|number| [number.to_bits()])
        .collect()
}

/// Returns the number rounded to an integer.
fn whole(number: f64, toward: char) -> f64 {
    match toward {
        'n' => number.round_ties_even(),
        'z' => number.trunc(),
        'm' => number.floor(),
        _ => number.ceil(),
    }
}
