//! The tests of this crate but those that need a process of their own, which Cargo.toml lists.

mod checkpoint_processes;
mod data_parallel;
mod faults;
mod fp8;
mod fp8_gather;
mod fp8_pipelines;
mod fp8_verify;
mod fused;
mod generate;
mod hf;
mod layouts;
mod oracle;
mod overlap;
mod packed;
mod pipeline_training;
mod pipelines;
mod precision;
mod reported;
mod resume;
mod spans;
mod stage_sums;
mod token_files;
mod training;
mod verify_settings;
mod zero;
mod zero3_plain;
