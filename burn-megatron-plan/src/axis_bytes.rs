//! Bytes that a rank sends, by axis.

use burn_megatron::mesh::{Axis, AxisSet};

/// The bytes that a rank sends in a step, by axis.
///
/// Bytes that are sent over several axes count for the last of these axes in the order of [`Axis::ALL`]. For example,
/// gradients that are summed over context and data count for data.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AxisBytes([f64; Axis::ALL.len()]);

impl AxisBytes {
    /// Adds bytes that are sent over these axes.
    pub fn add(&mut self, axes: AxisSet, bytes: f64) {
        if let Some(axis) = axes.iter().last() {
            self.0[axis as usize] += bytes;
        }
    }

    /// Returns the bytes that are sent over an axis.
    pub fn of(&self, axis: Axis) -> f64 {
        self.0[axis as usize]
    }

    /// Returns each axis over which bytes are sent, with the number of bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Axis, f64)> + '_ {
        let all = Axis::ALL.into_iter().map(|axis| (axis, self.of(axis)));
        all.filter(|(_, bytes)| *bytes > 0.0)
    }

    /// Returns the sum over all axes.
    pub fn total(&self) -> f64 {
        self.0.iter().sum()
    }
}
