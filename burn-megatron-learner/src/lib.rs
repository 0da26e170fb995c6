//! Data-parallel training with Burn's `Learner`.
//!
//! A [`MegatronStrategy`] is a training strategy of `burn::train`. It runs a
//! [`SupervisedTraining`](burn::train::SupervisedTraining) on the ranks of a [`World`](burn_megatron::comm::World).
//! Each rank trains on its part of the data. Only one line of the program changes:
//!
//! ```text
//! let training = SupervisedTraining::new(folder, dataloader_train, dataloader_valid)
//!     .metrics((LossMetric::new(),))
//!     .num_epochs(10)
//!     .with_training_strategy(MegatronStrategy::from_env()?.into());     // this line
//! let result = training.launch(Learner::new(model, optimizer, scheduler));
//! ```
//!
//! Each rank wraps the model in a [`DistributedDataParallel`](burn_megatron::data_parallel::DistributedDataParallel).
//! Hooks collect the gradients in buckets, which are reduced during the backward pass. By default, the optimizer of the
//! `Learner` updates the complete weights on every rank. With [`optimizer`](MegatronStrategy::optimizer) or
//! [`element_wise`](MegatronStrategy::element_wise), an optimizer of this library updates the weights. It can shard the
//! optimizer state, the gradients and the weights (ZeRO stages 1 to 3).
//!
//! # Feature flags
//!
//! The features `cuda`, `wgpu` and `fusion` enable the features of Burn with the same names. The feature `mpi` allows
//! ranks that are processes to communicate over MPI. The terminal interface requires the feature `tui` of Burn
//! (`burn/tui`).

mod batches;
mod checkpoints;
mod error;
mod loss_scale;
mod optimizer;
mod rank;
mod settings;
mod strategy;
mod validation;

pub use checkpoints::newest_epoch;
pub use error::LearnerError;
pub use loss_scale::scale_loss;
pub use optimizer::ShardedOptimizer;
pub use settings::MegatronStrategy;
