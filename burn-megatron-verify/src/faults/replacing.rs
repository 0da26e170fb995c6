//! A gradient buffer in which the last gradient replaces those before.

use std::sync::Arc;

use burn_megatron_kernels::gradient::{
    ComputeGradients, Destination, GradientBuffer, WeightGradientFn,
};

/// A buffer whose gradients replace what is in it.
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
