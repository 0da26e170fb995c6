//! A gradient buffer in which the last gradient replaces the gradients before it.

use std::sync::Arc;

use burn_megatron_kernels::gradient::{
    ComputeGradients, Destination, GradientBuffer, WeightGradientFn,
};

/// A buffer in which a new gradient replaces the old one.
pub(super) struct Replacing(Destination);

impl Replacing {
    /// Wraps the buffer of a destination.
    pub fn wrap(destination: Destination) -> Destination {
        Destination {
            parameter: destination.parameter,
            buffer: Arc::new(Self(destination)),
        }
    }
}

impl GradientBuffer for Replacing {
    fn accumulate(&self, parameters: &[usize], compute: ComputeGradients<'_>) {
        self.0.buffer.accumulate(parameters, &mut |target| {
            compute(target.map(|mut target| {
                target.places.iter_mut().for_each(|place| place.add = false);
                target
            }))
        });
    }

    fn accumulate_later(&self, parameter: usize, compute: WeightGradientFn) {
        self.0.buffer.accumulate_later(parameter, compute);
    }
}
