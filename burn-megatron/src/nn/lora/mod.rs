//! Low-rank adapters (LoRA) of the parallel linear layers.
//!
//! [`ModelBuilder::with_lora`](super::ModelBuilder::with_lora) freezes every parameter of the model and gives the target
//! layers factors `A` and `B`, which alone are trained. A frozen parameter has no gradient, bucket, master or moment:
//! [`DistributedDataParallel`](crate::data_parallel::DistributedDataParallel) keeps it apart, sharded with ZeRO-3.
//!
//! The factors are those of Burn's [`LoraAdapter`](burn::module::LoraAdapter). Its
//! [`Reparameterization`](burn::module::Reparameterization) is not used: it adds `A B` to the weight, whose gradient of full size is then computed in each backward and would have to be summed over the
//! tensor ranks. Here the input is multiplied by `A` and then by `B`:
//!
//! | layer | `A` `[in, rank]` | `B` `[rank, out]` | communication |
//! |---|---|---|---|
//! | column-parallel | replicated | split by output | of `x A` and its gradient, `rank` features wide; under sequence parallelism the gradient of `A` is summed over the tensor axis |
//! | row-parallel | split by input | replicated | none: the terms of the ranks are summed with those of the layer; the gradient of `B` is summed over the tensor axis |
//!
//! A fused layer, such as that of queries, keys and values, has separate factors for each of its sections, as `peft`
//! has for the layers of Llama.

mod adapters;
mod config;
mod registry;

pub use adapters::LoraAdapters;
pub(super) use adapters::{column_adapters, row_adapters};
pub use config::{LoraConfig, LoraTarget};
pub use registry::{AdaptedLayer, LoraLayers};
