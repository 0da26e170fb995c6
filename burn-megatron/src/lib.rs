#![doc = "Large-model training for Burn users: what Megatron-LM is to PyTorch."]
//!
//! Rooms, ground floor first; a room imports only rooms below it:
//! [`mesh`], [`comm`], [`collective`], [`nn`].

pub use burn_megatron_kernels as kernels;

pub mod collective;
pub mod comm;
pub mod data;
pub mod data_parallel;
pub mod device;
pub mod mesh;
pub mod nn;
pub mod optim;
pub mod train;
pub mod verify;
