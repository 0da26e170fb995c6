//! The engine with a fake NCCL over a fake device, compared with the engine of threads.

mod fake_device;
mod fake_lender;
mod fake_nccl;
mod faults;
pub mod harness;
mod libraries;
mod order;
pub mod programs;
mod random;
mod tensors;
mod whole;
