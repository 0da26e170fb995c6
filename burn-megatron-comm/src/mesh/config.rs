//! The requested parallel sizes.

use serde::{Deserialize, Serialize};

use super::{Axis, AxisOrder};

/// The size of each axis.
///
/// A plain value, checked by [`Mesh::new`](super::Mesh::new). In a file every field is optional, and an
/// unknown field is an error.
///
/// ```text
/// tensor = 2
/// pipeline = 4
/// order = "tp-cp-ep-dp-pp"
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// Ranks that share every weight matrix outside the experts.
    pub tensor: usize,
    /// Ranks that share every sequence.
    pub context: usize,
    /// Ranks that share the layers.
    pub pipeline: usize,
    /// Replicas of the model; `None` is the size of the world divided by the other axes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<usize>,
    /// Ranks that share the experts.
    pub expert: usize,
    /// Ranks that share every expert's weight matrices; `None` is the same as `tensor`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_tensor: Option<usize>,
    /// The order in which the axes number ranks.
    pub order: AxisOrder,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        ParallelConfig {
            tensor: 1,
            context: 1,
            pipeline: 1,
            data: None,
            expert: 1,
            expert_tensor: None,
            order: AxisOrder::default(),
        }
    }
}

impl ParallelConfig {
    /// Every size 1, and data parallelism over the whole world.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of ranks that share every weight matrix outside the experts.
    pub fn with_tensor(mut self, size: usize) -> Self {
        self.tensor = size;
        self
    }

    /// Sets the number of ranks that share every sequence.
    pub fn with_context(mut self, size: usize) -> Self {
        self.context = size;
        self
    }

    /// Sets the number of ranks that share the layers.
    pub fn with_pipeline(mut self, size: usize) -> Self {
        self.pipeline = size;
        self
    }

    /// Sets the number of replicas of the model, instead of deriving it from the world.
    pub fn with_data(mut self, size: usize) -> Self {
        self.data = Some(size);
        self
    }

    /// Sets the number of ranks that share the experts.
    pub fn with_expert(mut self, size: usize) -> Self {
        self.expert = size;
        self
    }

    /// Sets the number of ranks that share every expert's weight matrices, instead of `tensor`.
    pub fn with_expert_tensor(mut self, size: usize) -> Self {
        self.expert_tensor = Some(size);
        self
    }

    /// Sets the order in which the axes number ranks.
    pub fn with_order(mut self, order: AxisOrder) -> Self {
        self.order = order;
        self
    }

    /// Sets the size of any axis.
    pub fn with_size(self, axis: Axis, size: usize) -> Self {
        match axis {
            Axis::Tensor => self.with_tensor(size),
            Axis::Context => self.with_context(size),
            Axis::Expert => self.with_expert(size),
            Axis::ExpertTensor => self.with_expert_tensor(size),
            Axis::Data => self.with_data(size),
            Axis::Pipeline => self.with_pipeline(size),
        }
    }

    /// The required number of ranks: `tensor x context x pipeline x data`.
    ///
    /// `None` if `data` is `None`, or if the product overflows a `usize`.
    pub fn world_size(&self) -> Option<usize> {
        self.replica_size()?.checked_mul(self.data?)
    }

    /// The ranks of one replica of the model; `None` on overflow.
    pub(super) fn replica_size(&self) -> Option<usize> {
        self.tensor
            .checked_mul(self.context)?
            .checked_mul(self.pipeline)
    }

    /// The ranks of one replica of the experts; `None` on overflow.
    pub(super) fn expert_replica_size(&self) -> Option<usize> {
        self.expert_tensor_size()
            .checked_mul(self.expert)?
            .checked_mul(self.pipeline)
    }

    /// The size of the expert-tensor axis, which defaults to that of `tensor`.
    pub(super) fn expert_tensor_size(&self) -> usize {
        self.expert_tensor.unwrap_or(self.tensor)
    }
}
