//! Tests of the engine with a fake NCCL on a fake device. Results are compared with the results of the `threads`
//! engine.

pub mod collectives;
mod end_to_end;
mod fake_device;
mod fake_nccl;
mod fake_provider;
mod faults;
pub mod harness;
mod libraries;
mod ordering;
pub mod programs;
mod random;
mod tensors;
