//! AdamW on parts of a buffer, and on blocks with different learning rates.

use super::*;

/// A buffer with parts to which a step can be applied separately.
struct Cut {
    buffers: AdamWBuffers,
    gradient: Tensor<1>,
    blocks: Blocks,
    model: DType,
}

impl Cut {
    fn new(length: usize, device: &Device, own: DType, moments: DType) -> Self {
        Self {
            buffers: buffers(length, device, own, moments),
            gradient: flat(length, 0.7, device, own),
            blocks: blocks(0, length, device),
            model: own,
        }
    }

    /// Applies a step only to the elements `start..end`. Returns their weights, moments and copy of the weights.
    fn step(&self, start: usize, end: usize) -> [TensorData; 4] {
        let part = |tensor: &Tensor<1>| tensor.clone().slice(start..end);
        let (from, to) = (start / DECAY_BLOCK, end.div_ceil(DECAY_BLOCK));
        let some = |factors: &Tensor<1>| factors.clone().slice(from..to);
        let blocks = Blocks {
            decay: some(&self.blocks.decay),
            rate: self.blocks.rate.as_ref().map(some),
            first: start % DECAY_BLOCK,
        };
        let AdamWBuffers {
            master,
            first,
            second,
        } = &self.buffers;
        let own = AdamWBuffers {
            master: part(master),
            first: part(first),
            second: part(second),
        };
        let gradient = part(&self.gradient);
        let model = Tensor::empty([end - start], (&gradient.device(), self.model));
        let decay = Decay::Blocks(blocks);
        let (after, copy) = adamw(own, gradient, &decay, &numbers(2), Some(model));
        let copy = copy.expect("a copy was asked for");
        [after.master, after.first, after.second, copy].map(Tensor::into_data)
    }
}

/// Returns the bytes of the elements `start..end`.
fn bytes(data: &TensorData, start: usize, end: usize) -> &[u8] {
    let size = data.dtype().size();
    &data.as_bytes()[start * size..end * size]
}

#[test]
fn the_bits_of_an_element_do_not_depend_on_where_its_buffer_is_split() {
    for (device, has) in devices() {
        let mut kinds = vec![(DType::F32, DType::F32)];
        if has.contains(&DType::BF16) {
            kinds.push((DType::F32, DType::BF16));
        }
        if has.contains(&DType::F64) {
            kinds.push((DType::F64, DType::F64));
        }
        for (own, moments) in kinds {
            let check = |length: usize, cuts: &[usize]| {
                let whole = Cut::new(length, &device, own, moments);
                let expected = whole.step(0, length);
                for pair in cuts.windows(2) {
                    let (start, end) = (pair[0], pair[1]);
                    let part = whole.step(start, end);
                    for (part, expected) in part.iter().zip(&expected) {
                        let what = format!("{start}..{end} of {length}, {own:?} on {device:?}");
                        let all = bytes(part, 0, end - start);
                        assert_eq!(all, bytes(expected, start, end), "{what}");
                    }
                }
            };
            // The first cut is at every position of a block. The second cut moves with the first cut.
            for first in 0..DECAY_BLOCK {
                check(200, &[first, 200 - first / 2]);
            }
            // Forty cuts at positions from a Lehmer random number generator.
            let mut state = 20_231u64;
            let mut draw = || {
                state = state * 48_271 % 2_147_483_647;
                (state % 10_000) as usize
            };
            let mut cuts: Vec<_> = (0..40).map(|_| draw()).chain([0, 10_000]).collect();
            cuts.sort_unstable();
            cuts.dedup();
            check(10_000, &cuts);
        }
        // On the CPU, a buffer of this length is split into several tasks.
        if device == Device::flex() {
            let whole = Cut::new(300_001, &device, DType::F32, DType::F32);
            let expected = whole.step(0, 300_001);
            let part = whole.step(77, 300_000);
            for (part, expected) in part.iter().zip(&expected) {
                assert_eq!(bytes(part, 0, 299_923), bytes(expected, 77, 300_000));
            }
        }
    }
}

#[test]
fn a_factor_of_the_rate_is_a_rate_of_its_own() {
    let rates = [0.0, 0.5, 1.0, 2.0];
    for (device, _) in devices() {
        let length = 4 * DECAY_BLOCK;
        let own = || buffers(length, &device, DType::F32, DType::F32);
        let gradient = || flat(length, 0.7, &device, DType::F32);
        let step = |rate: f64, decay: &Decay| {
            let numbers = AdamWStep {
                rate: rate * numbers(1).rate,
                ..numbers(1)
            };
            let (after, _) = adamw(own(), gradient(), decay, &numbers, None);
            [after.master, after.first, after.second].map(Tensor::into_data)
        };
        let decay = Decay::Blocks(Blocks {
            rate: Some(factors(4, &rates.map(|rate| rate as f32), &device)),
            ..Blocks::new(factors(4, &[1.0], &device))
        });
        let grouped = step(1.0, &decay);
        for (block, rate) in rates.into_iter().enumerate() {
            // The rates are powers of two (or 0), so multiplying by them is exact.
            let alone = step(rate, &Decay::All);
            let (start, end) = (block * DECAY_BLOCK, (block + 1) * DECAY_BLOCK);
            for (grouped, alone) in grouped.iter().zip(&alone) {
                assert_eq!(
                    bytes(grouped, start, end),
                    bytes(alone, start, end),
                    "{rate}"
                );
            }
        }
        let before = own().master.into_data();
        assert_eq!(bytes(&grouped[0], 0, 64), bytes(&before, 0, 64));
    }
}
