//! The parts into which the time of a training step is divided.

use std::ops::{Add, AddAssign, Index, IndexMut, Mul};

use serde::Serialize;

/// A part of the time of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepPart {
    /// Matrix multiplications.
    Products,
    /// Attention.
    Attention,
    /// Memory-bound operations: norms, activation functions, rotary position embeddings and residual additions.
    Streaming,
    /// The overhead per operation, such as kernel launches.
    Overhead,
    /// Waiting for tensor-parallel communication.
    Tensor,
    /// Waiting for context-parallel communication.
    Context,
    /// Waiting for expert-parallel communication.
    Expert,
    /// Recomputing activations in the backward.
    Recomputation,
    /// Waiting for activations that are copied to or from the host.
    Offload,
    /// Waiting for other stages of the pipeline.
    Bubble,
    /// Waiting for data-parallel communication of gradients and parameters.
    Data,
    /// The optimizer step.
    Optimizer,
}

impl StepPart {
    /// All parts.
    pub const ALL: [Self; 12] = [
        Self::Products,
        Self::Attention,
        Self::Streaming,
        Self::Overhead,
        Self::Tensor,
        Self::Context,
        Self::Expert,
        Self::Recomputation,
        Self::Offload,
        Self::Bubble,
        Self::Data,
        Self::Optimizer,
    ];

    /// Returns the name that reports show.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Products => "products",
            Self::Attention => "attention",
            Self::Streaming => "streaming",
            Self::Overhead => "overhead",
            Self::Tensor => "tensor exchanges",
            Self::Context => "context exchanges",
            Self::Expert => "expert exchanges",
            Self::Recomputation => "recomputation",
            Self::Offload => "transfers of the host",
            Self::Bubble => "bubble",
            Self::Data => "data exchanges",
            Self::Optimizer => "optimizer",
        }
    }
}

/// The time in seconds of each [`StepPart`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PartSeconds([f64; StepPart::ALL.len()]);

impl PartSeconds {
    /// Creates times in which only one part is not 0.
    pub fn of(part: StepPart, seconds: f64) -> Self {
        let mut all = Self::default();
        all[part] = seconds;
        all
    }

    /// Returns the sum of all parts.
    pub fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    /// Returns each part with its seconds.
    pub fn iter(&self) -> impl Iterator<Item = (StepPart, f64)> + '_ {
        StepPart::ALL.into_iter().map(|part| (part, self[part]))
    }

    /// Returns the part with the longest time, except matrix multiplications and attention, which every layout needs.
    pub fn largest_cost(&self) -> StepPart {
        let avoidable = StepPart::ALL.into_iter().skip(2);
        let largest = avoidable.max_by(|one, two| self[*one].total_cmp(&self[*two]));
        largest.unwrap_or(StepPart::Streaming)
    }
}

impl Index<StepPart> for PartSeconds {
    type Output = f64;

    fn index(&self, part: StepPart) -> &f64 {
        &self.0[part as usize]
    }
}

impl IndexMut<StepPart> for PartSeconds {
    fn index_mut(&mut self, part: StepPart) -> &mut f64 {
        &mut self.0[part as usize]
    }
}

impl AddAssign for PartSeconds {
    fn add_assign(&mut self, other: Self) {
        for (own, other) in self.0.iter_mut().zip(other.0) {
            *own += other;
        }
    }
}

impl Add for PartSeconds {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl Mul<f64> for PartSeconds {
    type Output = Self;

    fn mul(mut self, factor: f64) -> Self {
        self.0.iter_mut().for_each(|seconds| *seconds *= factor);
        self
    }
}
