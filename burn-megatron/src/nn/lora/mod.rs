//! Low-rank adapters (LoRA) of the parallel linear layers.
//!
//! [`ModelBuilder::with_lora`](super::ModelBuilder::with_lora) freezes every parameter of the model and adds factors
//! `A` and `B` to the target layers. Only these factors are trained. A frozen parameter has no gradient, gradient
//! bucket, master weight or optimizer moments.
//! [`DistributedDataParallel`](crate::data_parallel::DistributedDataParallel) stores frozen parameters separately, and
//! shards them with ZeRO-3.
//!
//! The factors are Burn's [`LoraAdapter`](burn::module::LoraAdapter). Its
//! [`Reparameterization`](burn::module::Reparameterization) is not used, because it adds `A B` to the weight. Each
//! backward pass would then compute a full-size gradient of the weight and sum this gradient over the tensor ranks.
//! Instead the input is multiplied by `A` and then by `B`:
//!
//! | layer | `A` `[in, rank]` | `B` `[rank, out]` | communication |
//! |---|---|---|---|
//! | column-parallel | replicated | split by output | collectives of `x A` and of its gradient, with `rank` features per token; under sequence parallelism the gradient of `A` is summed over the tensor axis |
//! | row-parallel | split by input | replicated | none in the forward pass, because the adapter outputs of the ranks are summed together with the output of the layer; the gradient of `B` is summed over the tensor axis |
//!
//! A fused layer, such as the QKV projection, has separate factors for each of its sections. `peft` also has separate
//! factors for these layers in Llama.

mod adapters;
mod config;
mod registry;

pub use adapters::LoraAdapters;
pub(super) use adapters::{column_adapters, row_adapters};
pub use config::{LoraConfig, LoraTarget};
pub use registry::{AdaptedLayer, LoraLayers};
