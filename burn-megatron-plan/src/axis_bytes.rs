//! The number of bytes that a rank sends, by parallel axis.

use burn_megatron::mesh::{Axis, AxisSet};

/// The number of bytes that a rank sends in a training step, for each parallel axis.
///
/// If a collective covers several axes, its bytes are counted for only one of them: the last axis in the order of
/// [`Axis::ALL`]. For example, gradients that are reduced over the context axis and the data axis are counted for the
/// data axis.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AxisBytes([f64; Axis::ALL.len()]);

impl AxisBytes {
    /// Adds the bytes that are sent in a collective over the given axes.
    pub fn add(&mut self, axes: AxisSet, bytes: f64) {
        if let Some(axis) = axes.iter().last() {
            self.0[axis as usize] += bytes;
        }
    }

    /// Returns the number of bytes that are sent over an axis.
    pub fn of(&self, axis: Axis) -> f64 {
        self.0[axis as usize]
    }

    /// Returns an iterator over the axes over which bytes are sent, with the number of bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Axis, f64)> + '_ {
        let all = Axis::ALL.into_iter().map(|axis| (axis, self.of(axis)));
        all.filter(|(_, bytes)| *bytes > 0.0)
    }

    /// Returns the number of bytes that are sent over all axes.
    pub fn total(&self) -> f64 {
        self.0.iter().sum()
    }
}
