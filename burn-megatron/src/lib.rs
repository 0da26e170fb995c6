#![doc = "Large-model training for Burn users: what Megatron-LM is to PyTorch."]
//!
//! The user provides a Burn module and a parallel layout, and the library trains the module on many ranks. With
//! `burn_megatron_verify` a user can check on a laptop that a model in this layout computes the same values as on a
//! single rank.
//!
//! The library has no global state. A [`ParallelContext`](comm::ParallelContext) holds the process groups of a rank. A
//! [`ModelBuilder`](nn::ModelBuilder) builds the rank's part of a model.
//!
//! This table lists the modules of this crate. Each module imports only modules above it in the table:
//!
//! | module | content |
//! |---|---|
//! | [`mesh`] | the device mesh: sizes, coordinates and groups of ranks, computed without communication |
//! | [`comm`] | collectives between ranks, which are threads or processes |
//! | [`collective`] | differentiable collectives on tensors |
//! | [`fingerprint`] | 64-bit fingerprints of the values that a training step computes, for comparing two runs |
//! | [`host_link`] | recording of transfers between device and host memory, and simulation of the transfer times |
//! | [`kernel_selection`] | selection of a fused or unfused implementation for each operation |
//! | [`nn`] | parallel layers, and the parameter table of a model |
//! | [`pipeline`] | pipeline schedules, and the engine that executes them |
//! | [`data_parallel`] | data parallelism for any Burn module, with replicated or fully sharded parameters |
//! | [`optim`] | sharded AdamW, gradient norm and gradient clipping |
//! | [`checkpoint`] | checkpoints that can be loaded in any parallel layout |
//! | [`model`] | the traits that a model implements, and the builder of its pipeline stages |
//! | [`regular_file`] | opening and reading regular files; a pipe, a device or a folder is an error |
//! | [`atomic_file`] | atomic writes of files and folders, and the clean-up after a crash |
//! | [`device`] | selection of devices by name, with checks that run before Burn is called |
//! | [`text_table`] | text tables that fit the width of a terminal |
//!
//! # Feature flags
//!
//! The features `cuda`, `wgpu`, `fusion` and `tracing` enable the Burn features of the same names. The CPU backend
//! (Burn's Flex) is always available, and no GPU backend is enabled by default. With the feature `mpi`, ranks can run
//! as processes that communicate over the system's MPI library. To build this feature, the compiler wrapper `mpicc` and
//! libclang are required.
//!
//! # Example
//!
//! A linear layer on two ranks. Each rank holds half of the columns of the weight:
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

/// The items that most programs need. The prelude of `burn-megatron-train` also contains the trainer.
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

    /// The type of any error, for functions that return errors of different types.
    pub type AnyError = Box<dyn std::error::Error + Send + Sync>;
}
