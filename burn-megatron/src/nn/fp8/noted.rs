//! What quantisers have seen of one tensor in a step. It stays on the device until the step ends.

use burn::tensor::{Device, Tensor};

/// As many are put together to one tensor.
const TOGETHER: usize = 64;

/// The magnitudes of one operand, of all micro-batches and uses.
#[derive(Debug, Default)]
pub(super) struct Noted {
    /// Pairs of the largest magnitude and the number of values beyond the format.
    seen: Vec<Tensor<1>>,
    /// How many values were looked at.
    elements: u64,
}

/// What a step has shown of an operand.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Seen {
    /// The largest magnitude, if there was any tensor.
    pub amax: Option<f32>,
    /// The values beyond the largest of the format.
    pub beyond: u64,
    /// All values.
    pub elements: u64,
}

impl Noted {
    pub fn push(&mut self, seen: Tensor<1>, elements: usize) {
        self.seen.push(seen);
        self.elements += elements as u64;
        if self.seen.len() == TOGETHER {
            let together = Tensor::cat(std::mem::take(&mut self.seen), 0);
            self.seen.push(together);
        }
    }

    /// Everything so far, with one read for each device for all of them.
    pub fn read(all: Vec<Self>) -> Vec<Seen> {
        let mut read: Vec<Seen> = all
            .iter()
            .map(|noted| Seen {
                elements: noted.elements,
                ..Seen::default()
            })
            .collect();
        let tensors = all.into_iter().enumerate();
        let tensors = tensors.flat_map(|(at, noted)| noted.seen.into_iter().map(move |t| (at, t)));
        let mut devices: Vec<(Device, Vec<(usize, Tensor<1>)>)> = vec![];
        for (at, tensor) in tensors {
            let device = tensor.device();
            match devices.iter_mut().find(|(known, _)| *known == device) {
                Some((_, tensors)) => tensors.push((at, tensor)),
                None => devices.push((device, vec![(at, tensor)])),
            }
        }
        for (_, tensors) in devices {
            let owners: Vec<_> = tensors
                .iter()
                .flat_map(|(at, tensor)| vec![*at; tensor.dims()[0] / 2])
                .collect();
            let tensors = tensors.into_iter().map(|(_, tensor)| tensor).collect();
            let values = Tensor::cat(tensors, 0).into_data();
            let values: Vec<f32> = values.iter::<f32>().collect();
            for (at, pair) in owners.into_iter().zip(values.chunks(2)) {
                read[at].add(pair[0], pair[1] as u64);
            }
        }
        read
    }
}

impl Seen {
    fn add(&mut self, amax: f32, beyond: u64) {
        // By their bits, so that a NaN is above all.
        let bits = self.amax.map_or(0, f32::to_bits).max(amax.to_bits());
        self.amax = Some(f32::from_bits(bits));
        self.beyond += beyond;
    }
}
