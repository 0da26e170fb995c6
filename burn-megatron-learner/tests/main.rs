//! The strategy with Burn's `Learner`, compared with Burn's strategy on one device.

mod checkpoints;
mod equality;
mod examples;
mod failures;
mod model;
#[cfg(feature = "mpi")]
mod mpi_processes;
mod running_states;
mod settings;
