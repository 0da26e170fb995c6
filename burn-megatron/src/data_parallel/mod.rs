//! Data parallelism for any Burn module. Parameters and gradients are stored in flat buffers, which are replicated or
//! sharded over the ranks. The backward passes the gradients to hooks of the parameters. Gradients are summed over the
//! micro-batches and the ranks, and divided by the number of tokens. The main entry point is
//! [`DistributedDataParallel`].
//!
//! ```text
//! let mut ddp = DistributedDataParallel::new(model, &groups)?;
//! for batch in micro_batches {
//!     let loss = ddp.forward(&device, |model| model.loss(batch));   // summed over the tokens
//!     ddp.backward(loss);                                           // backward_last for the last
//! }
//! let gradients = ddp.reduce(tokens)?;                              // tokens of this rank
//! ```
//!
//! In a training step, the gradient of a weight and the updated weight are computed as follows:
//!
//! 1. `nn::linear_function`: the backward passes the operands of the matmul `x^T dy` to the gradient sink of the
//!    weight's hook (`nn::hook`). The matmul is not computed yet. Fused operations defer the gradients of biases and
//!    norms in the same way, and the embedding defers the gradients of its rows. Gradients of other parameters are
//!    computed before they are passed to the sink.
//! 2. `ParamAndGradBuffers` is the gradient sink. It takes the flat buffer of the weight's bucket, and the matmul
//!    writes its result to the buffer or adds it to the buffer.
//! 3. `gradient_buckets`: after the last gradient of a bucket, `reduction` sums the bucket over the data-parallel group
//!    of its grid, while the backward continues. For dense parameters, the group consists of the context and data axes.
//!    For experts, it is the data axis of the expert grid.
//! 4. [`reduce`](DistributedDataParallel::reduce) waits for the reductions, sums partial sums over the other axes
//!    (`gradients`), and returns [`Gradients`]. `optim::norm` computes the gradient norm.
//! 5. `bucket_step` passes the master weights and the gradient of each bucket to the optimizer. `parameter_buckets`
//!    stores the updated master weights and gathers the parameters in the dtype of the model, which the hook returns in
//!    the next forward.
//!
//! [`DataParallelConfig`] sets the sharded state (ZeRO 1 to 3, HSDP), the dtype in which the model computes, and the
//! overlap with communication. With `fp8_param_gather` the weights of FP8 layers are gathered in FP8. Their buckets
//! have one byte per element. Every rank stores the rowwise and the columnwise copy of each weight for the GEMMs of the
//! layers ([`GradientSink::quantized`](crate::nn::hook::GradientSink::quantized)). The optimizer updates sharded f32
//! master weights, which a checkpoint saves and the replica check compares. Weights are also quantized again after a
//! skipped step, because the amax of the step may change the scales.

mod bucket_step;
mod coalesced_all_reduce;
mod config;
mod ddp;
mod error;
mod freed_memory;
mod frozen;
mod fsdp_unit;
mod gradient_buckets;
mod gradient_check;
mod gradient_tracker;
mod gradients;
pub mod layout;
mod memory;
mod memory_usage;
mod model_checks;
pub mod offload;
mod own_backward;
mod param_and_grad_buffers;
mod parameter_buckets;
mod plan_builder;
mod precision;
mod prefetch_order;
mod quantized;
mod reduction;
mod replica_groups;
mod replicas;
mod running_state;
mod segments;
mod sharding_estimate;
mod sharding_groups;
mod sharding_plan;
mod stores;
#[cfg(test)]
mod tests;

pub use bucket_step::{AfterStep, BucketShard, BucketStep, StepFn, SteppedBucket};
pub use config::{DataParallelConfig, OffloadConfig, ParameterGather};
pub use ddp::DistributedDataParallel;
pub use error::{DataParallelConfigError, DataParallelError, MemoryError, OffloadError};
pub use frozen::{freeze, freeze_in_all_stages};
pub use gradient_buckets::MicroBatchUses;
pub use gradient_check::InvalidGradient;
pub use gradients::{Gradients, ReductionRecord};
pub use memory::{
    MemoryPlan, MemoryRules, ParseZeroStageError, ZeroStage, format_bytes, host_memory,
};
pub use memory_usage::{MemoryCategory, MemoryUsage, TrackedAllocation};
pub use offload::OffloadPlan;
pub use precision::{Moments, Precision};
pub use running_state::running_states;
pub use sharding_estimate::ShardingEstimate;
pub use sharding_groups::ShardingGroups;
pub(crate) use sharding_groups::partition_index;
