#![doc = "Large-model training for Burn users: what Megatron-LM is to PyTorch."]
//!
//! The user provides a Burn module and a parallel layout, and the library runs the module on many ranks. On a
//! laptop, `burn_megatron_verify` checks that the layout computes the same values as a single rank. There is no
//! global state. A [`ParallelContext`](comm::ParallelContext) handle holds the process groups of a rank. A
//! [`ModelBuilder`](nn::ModelBuilder) builds the rank's part of a model.
//!
//! Modules, lowest first. A module imports only the modules above it in this table:
//!
//! | module | content |
//! |---|---|
//! | [`mesh`] | sizes, coordinates and groups of ranks, as pure values |
//! | [`comm`] | collectives between ranks, which are threads or processes |
//! | [`collective`] | differentiable collectives on tensors |
//! | [`fingerprint`] | 64-bit fingerprints of the values in a step, to compare two runs of the step |
//! | [`host_link`] | records of transfers between a device and its host, and a simulation of their times |
//! | [`kernel_selection`] | selection of fused kernels |
//! | [`nn`] | parallel layers, and the parameter table |
//! | [`pipeline`] | pipeline schedules, and the engine that runs them |
//! | [`data_parallel`] | data parallelism and full sharding of any Burn module |
//! | [`optim`] | sharded AdamW, gradient norm and clipping |
//! | [`checkpoint`] | checkpoints that load in any layout |
//! | [`model`] | the traits that a model implements, and the builder of its pipeline stages |
//! | [`regular_file`] | opening and reading files, with an error for a pipe, a device or a folder |
//! | [`atomic_file`] | atomic writes of files and folders, and the clean-up after a crash |
//! | [`device`] | selection of devices by name, checked before Burn is called |
//! | [`text_table`] | tables of text that fit a terminal |
//!
//! # Feature flags
//!
//! Burn's features are forwarded by name: `cuda`, `wgpu`, `fusion`, `tracing`. The CPU (Burn's Flex) is
//! always available; no GPU is enabled by default. `mpi` runs ranks as processes over the MPI library of the
//! system; building it needs the compiler wrapper `mpicc` and libclang.
//!
//! # Example
//!
//! A linear layer on two ranks, each with half of its columns:
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_megatron::prelude::*;
//!
//! let outputs = World::threads(2)?.run(|rank| -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
//!     let groups = ParallelContext::new(&ParallelConfig::new().with_tensor(2), &rank)?;
//!     let builder = ModelBuilder::new(&groups, &Device::flex());
//!     let layer = ColumnParallelLinearConfig::new(8, 6).init(&builder)?;
//!     Ok(layer.forward(Tensor::ones([1, 4, 8], &Device::flex())).dims())
//! })?;
//! assert_eq!(outputs, [[1, 4, 3], [1, 4, 3]]);
//! # Ok::<(), burn_megatron::comm::WorldError>(())
//! ```

pub use burn_megatron_comm as comm;
pub use burn_megatron_comm::mesh;
pub use burn_megatron_kernels as kernels;

pub mod atomic_file;
pub mod checkpoint;
pub mod collective;
pub mod data_parallel;
pub mod device;
pub mod fingerprint;
mod glob;
pub mod host_link;
pub mod kernel_selection;
pub mod model;
pub mod nn;
pub mod optim;
pub mod pipeline;
pub mod regular_file;
#[cfg(test)]
mod testing;
pub mod text_table;

/// The items that most programs need. The prelude of `burn-megatron-train` adds the trainer.
pub mod prelude {
    pub use crate::comm::{Communicator, ParallelContext, Rank, World};
    pub use crate::data_parallel::DistributedDataParallel;
    pub use crate::mesh::{Axis, Grid, Mesh, ParallelConfig};
    pub use crate::model::{LanguageModel, ModelConfig};
    pub use crate::nn::{
        ColumnParallelLinear, ColumnParallelLinearConfig, ModelBuilder, ParallelModule,
        RowParallelLinear, RowParallelLinearConfig,
    };
    pub use crate::optim::{AdamWConfig, OptimizerConfig, ParallelAdamW};

    /// Any error of a rank or of a program.
    pub type AnyError = Box<dyn std::error::Error + Send + Sync>;
}
