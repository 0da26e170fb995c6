//! Bytes by the axes that they are sent over.

use burn_megatron::mesh::{Axis, AxisSet};

/// The bytes that a rank sends in a step, by axis. What is sent over several axes counts for the last of them in the order
/// of [`Axis::ALL`]: gradients, summed over context and data, for data.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AxisBytes([f64; Axis::ALL.len()]);

impl AxisBytes {
    /// Adds bytes that are sent over these axes.
    pub fn add(&mut self, axes: AxisSet, bytes: f64) {
        if let Some(axis) = axes.iter().last() {
            self.0[axis as usize] += bytes;
        }
    }

    /// The bytes over an axis.
    pub fn of(&self, axis: Axis) -> f64 {
        self.0[axis as usize]
    }

    /// The axes over which anything is sent, with its bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Axis, f64)> + '_ {
        let all = Axis::ALL.into_iter().map(|axis| (axis, self.of(axis)));
        all.filter(|(_, bytes)| *bytes > 0.0)
    }

    /// The sum over all axes.
    pub fn total(&self) -> f64 {
        self.0.iter().sum()
    }
}
