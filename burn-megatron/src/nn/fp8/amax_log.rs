//! The magnitudes of one operand in a step, on the device until the step ends.

use burn::tensor::{Device, Tensor};

/// This many entries are concatenated to one tensor.
const CONCATENATE_AFTER: usize = 64;

/// The magnitudes of one operand, of all micro-batches and uses.
#[derive(Debug, Default)]
pub(super) struct AmaxLog {
    /// Pairs of the largest magnitude and the number of values beyond the largest of the format.
    entries: Vec<Tensor<1>>,
    /// The number of values.
    elements: u64,
}

/// The statistics of an operand in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct AmaxStatistics {
    /// The largest magnitude, if there was a tensor.
    pub amax: Option<f32>,
    /// The number of values beyond the largest of the format.
    pub beyond: u64,
    /// The number of values.
    pub elements: u64,
}

impl AmaxLog {
    pub fn push(&mut self, seen: Tensor<1>, elements: usize) {
        self.entries.push(seen);
        self.elements += elements as u64;
        if self.entries.len() == CONCATENATE_AFTER {
            let concatenated = Tensor::cat(std::mem::take(&mut self.entries), 0);
            self.entries.push(concatenated);
        }
    }

    /// The statistics of all logs, with one read per device.
    pub fn read(all: Vec<Self>) -> Vec<AmaxStatistics> {
        let mut statistics: Vec<AmaxStatistics> = all
            .iter()
            .map(|log| AmaxStatistics {
                elements: log.elements,
                ..AmaxStatistics::default()
            })
            .collect();
        let logs = all.into_iter().enumerate();
        let tensors = logs.flat_map(|(at, log)| log.entries.into_iter().map(move |t| (at, t)));
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
                statistics[at].add(pair[0], pair[1] as u64);
            }
        }
        statistics
    }
}

impl AmaxStatistics {
    fn add(&mut self, amax: f32, beyond: u64) {
        // Compared as bits, so that a NaN is the largest.
        let bits = self.amax.map_or(0, f32::to_bits).max(amax.to_bits());
        self.amax = Some(f32::from_bits(bits));
        self.beyond += beyond;
    }
}
