//! The CPU implementation. It makes one pass over the values, in tasks of a fixed number of elements.

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;

use super::Coding;
use crate::cpu::{Element, ROW_GRAIN, Real, for_each_task, for_float, slice, vector, vectorized};
use crate::fp8::format::{Format, Rounding};

/// The number of values that are encoded before they are packed. They stay in the L1 cache.
const BATCH: usize = 1024;

/// Encodes values. See [`encode`](super::encode).
pub(super) fn encode(coding: Coding, values: &FlexTensor) -> FlexTensor {
    vector(for_float!(values.dtype(), E => encode_all(coding, slice::<E>(values))))
}

fn encode_all<E: Element>(coding: Coding, values: &[E]) -> Vec<u32> {
    let per_word = coding.per_word();
    let mut words = vec![0; values.len().div_ceil(per_word)];
    let parts = words.chunks_mut(ROW_GRAIN / per_word);
    for_each_task(parts.zip(values.chunks(ROW_GRAIN)), |(words, values)| {
        encode_part(coding, values, words)
    });
    words
}

/// Encodes values with a loop that is compiled separately for each coding.
fn encode_part<E: Element>(coding: Coding, values: &[E], words: &mut [u32]) {
    macro_rules! each {
        ($($coding:path),*) => {
            match coding {
                $($coding => vectorized(
                    #[inline(always)]
                    || encode_batches($coding, values, words),
                ),)*
            }
        };
    }
    const E4M3: Coding = Coding::Value(Format::E4M3);
    const E5M2: Coding = Coding::Value(Format::E5M2);
    const E2M1: Coding = Coding::Value(Format::E2M1);
    const NEAREST: Coding = Coding::Scale(Rounding::Nearest);
    const UP: Coding = Coding::Scale(Rounding::Up);
    each!(E4M3, E5M2, E2M1, NEAREST, UP)
}

#[inline(always)]
fn encode_batches<E: Element>(coding: Coding, values: &[E], words: &mut [u32]) {
    let per_word = coding.per_word();
    let mut codes = [0u8; BATCH];
    let batches = values.chunks(BATCH);
    for (values, words) in batches.zip(words.chunks_mut(BATCH / per_word)) {
        for (code, value) in codes.iter_mut().zip(values) {
            *code = coding.encode(value.wide().double() as f32);
        }
        // The unused bits of the last word are 0.
        codes[values.len()..].fill(0);
        for (word, codes) in words.iter_mut().zip(codes.chunks_exact(per_word)) {
            let placed = codes.iter().zip((0..).step_by(coding.bits() as usize));
            *word = placed.fold(0, |word, (code, place)| word | u32::from(*code) << place);
        }
    }
}

/// Decodes values. See [`decode`](super::decode).
pub(super) fn decode(coding: Coding, count: usize, dtype: DType, codes: &FlexTensor) -> FlexTensor {
    for_float!(dtype, E => vector(decode_all::<E>(coding, count, slice(codes))))
}

fn decode_all<E: Element>(coding: Coding, count: usize, words: &[u32]) -> Vec<E> {
    let (bits, per_word) = (coding.bits(), coding.per_word());
    let value = |code: u8| E::narrow(E::Wide::of(f64::from(coding.decode(code))));
    let table: [E; 256] = std::array::from_fn(|code| value(code as u8));
    let mut values = vec![value(0); count];
    let part = |values: &mut [E], words: &[u32]| {
        for (values, word) in values.chunks_mut(per_word).zip(words) {
            for (value, place) in values.iter_mut().zip((0..).step_by(bits as usize)) {
                *value = table[(word >> place & 0xff) as usize];
            }
        }
    };
    let parts = values.chunks_mut(ROW_GRAIN);
    for_each_task(
        parts.zip(words.chunks(ROW_GRAIN / per_word)),
        |(values, words)| part(values, words),
    );
    values
}
