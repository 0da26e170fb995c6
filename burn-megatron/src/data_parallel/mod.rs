//! Data parallelism for any Burn module. Parameters and gradients are stored in flat buffers, which are
//! replicated or sharded over the ranks. The backward passes gradients to the parameters' hooks. They are
//! summed over the micro-batches and the ranks, and divided by the number of tokens. The main entry point is
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
//! The path of a weight gradient, from the layer to the weight of the next step:
//!
//! 1. `nn::linear_function`: the backward passes the product `x^T dy`, not computed yet, to the sink of the
//!    weight's hook (`nn::hook`). So do fused operations for biases and norms, and the embedding for its rows.
//!    Gradients of other parameters are computed before they reach the sink.
//! 2. `ParamAndGradBuffers`, the sink, takes the flat buffer of the weight's bucket, and the product is written
//!    or added to it.
//! 3. `gradient_buckets`: after the last gradient of a bucket, `reduction` sums the bucket over the
//!    data-parallel group of its grid, while backward continues. The group is context and data for dense
//!    parameters, and the expert grid's data for experts.
//! 4. [`reduce`](DistributedDataParallel::reduce) waits, sums the partial sums over other axes (`gradients`),
//!    and returns [`Gradients`]. `optim::norm` reads them.
//! 5. `bucket_step` passes each bucket's masters and gradient to the optimizer. `parameter_buckets` stores the
//!    new masters and gathers the model's copy, which the hook returns in the next forward.
//!
//! [`DataParallelConfig`] sets the sharded state (ZeRO 1 to 3, HSDP), the dtype in which the model computes,
//! and the overlap with communication. With `fp8_param_gather` the weights of FP8 layers are gathered in FP8.
//! Their buckets have one byte per element, and every rank stores the two copies that the layers multiply with
//! ([`GradientSink::quantized`](crate::nn::hook::GradientSink::quantized)). The optimizer updates the sharded
//! f32 masters, which a checkpoint saves and the replica check compares. Weights are also quantized again after
//! a skipped step, because its amax may change the scales.

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
