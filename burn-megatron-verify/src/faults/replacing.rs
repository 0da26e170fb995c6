//! A faulty gradient buffer, in which each gradient replaces the previous gradient instead of being added to it.

use std::sync::Arc;

use burn_megatron_kernels::gradient::{
    ComputeGradients, Destination, GradientBuffer, WeightGradientFn,
};

/// A gradient buffer in which a new gradient replaces the previous gradient.
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
