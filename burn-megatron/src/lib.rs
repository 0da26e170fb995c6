#![doc = "Large-model training for Burn users: what Megatron-LM is to PyTorch."]
//!
//! A user brings a Burn module and a layout; the library runs it over ranks, and proves on a laptop
//! that the layout computes what one rank computes ([`verify`]). There is no global state: a
//! [`Groups`](comm::Groups) handle says who the ranks are, and a [`Scope`](nn::Scope) builds a
//! module for one of them.
//!
//! Rooms, ground floor first; a room imports only rooms below it:
//!
//! | room | what it owns |
//! |---|---|
//! | [`mesh`] | sizes, coordinates and groups of ranks; pure values |
//! | [`comm`] | collectives between ranks, which are threads or processes |
//! | [`collective`] | the same on tensors, each forward with its backward |
//! | [`choice`] | which operations run as fused kernels |
//! | [`nn`] | parallel layers, and the table of how their parameters lie |
//! | [`pipeline`] | schedules, and the engine that runs them |
//! | [`data_parallel`] | gradients of any Burn module, summed over the ranks |
//! | [`optim`] | AdamW, the global gradient norm |
//! | [`checkpoint`] | tensors of whole models, saved by one layout and loaded by another |
//! | [`model`] | what a language model is to those that train it and to those that draw text from it |
//! | [`tokenizer`] | from text to tokens and back |
//! | [`generate`] | text from a language model |
//! | [`data`] | tokens, sampled independently of the layout |
//! | [`train`] | the loop, and what a person sees of it |
//! | [`verify`] | the proof |
//! | [`bounded`] | files that are read whole, up to a size |
//! | [`partial`] | files and folders in the making, and what killed processes left of them |
//! | [`device`] | devices by name, looked for before Burn is asked for them |
//!
//! # Feature flags
//!
//! Burn's own names, forwarded: `cuda`, `wgpu`, `fusion`, `tracing`. The CPU (Burn's Flex) is always
//! there; no GPU is on by default. `mpi` is ours: ranks as processes over the MPI library of the system,
//! whose compiler wrapper `mpicc` and libclang are needed to build it.
//!
//! # Example
//!
//! A linear layer over two ranks, each with half of its columns:
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_megatron::prelude::*;
//!
//! let outputs = World::threads(2)?.run(|rank| -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
//!     let groups = Groups::new(&ParallelConfig::new().with_tensor(2), &rank)?;
//!     let scope = Scope::new(&groups, &Device::flex());
//!     let layer = ColumnParallelLinearConfig::new(8, 6).init(&scope)?;
//!     Ok(layer.forward(Tensor::ones([1, 4, 8], &Device::flex())).dims())
//! })?;
//! assert_eq!(outputs, [[1, 4, 3], [1, 4, 3]]);
//! # Ok::<(), burn_megatron::comm::WorldError>(())
//! ```

pub use burn_megatron_comm as comm;
pub use burn_megatron_comm::mesh;
pub use burn_megatron_kernels as kernels;

pub mod bounded;
pub mod checkpoint;
pub mod choice;
pub mod collective;
pub mod data;
pub mod data_parallel;
pub mod device;
pub mod generate;
mod glob;
pub mod model;
pub mod nn;
pub mod optim;
pub mod partial;
pub mod pipeline;
#[cfg(test)]
mod testing;
pub mod tokenizer;
pub mod train;
pub mod verify;

/// What most programs need.
pub mod prelude {
    pub use crate::comm::{Communicator, Groups, Rank, World};
    pub use crate::data_parallel::DistributedDataParallel;
    pub use crate::mesh::{Axis, Mesh, ParallelConfig};
    pub use crate::nn::{
        ColumnParallelLinear, ColumnParallelLinearConfig, ParallelModule, RowParallelLinear,
        RowParallelLinearConfig, Scope,
    };
    pub use crate::optim::{AdamWConfig, ParallelAdamW};
    pub use crate::train::{LanguageModel, TrainConfig, Trainer};
    pub use crate::verify::{Layout, verify};
}
