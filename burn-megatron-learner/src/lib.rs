//! Runs Burn's `Learner` on many ranks.
//!
//! A [`MegatronStrategy`] is a training strategy of `burn::train`. It runs the epochs of a
//! [`SupervisedTraining`](burn::train::SupervisedTraining) on the ranks of a [`World`](burn_megatron::comm::World).
//! Each rank trains on its part of the data. The rest of the program does not change:
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
//! Hooks collect the gradients, and buckets of gradients are reduced during the backward. By default, the optimizer of
//! the `Learner` steps the weights on every rank. With [`optimizer`](MegatronStrategy::optimizer) or
//! [`element_wise`](MegatronStrategy::element_wise), an optimizer of this library steps shards of the weights (ZeRO-1
//! to 3).
//!
//! # Feature flags
//!
//! Burn's `cuda`, `wgpu` and `fusion`, and `mpi` for ranks as processes over MPI. The terminal interface is Burn's: `burn/tui`.

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
