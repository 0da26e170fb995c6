//! Compiles every CubeCL kernel of `burn-megatron-kernels` to machine code without a GPU, and
//! checks it.
//!
//! The pipeline of one kernel: CubeCL expands it for an [architecture](arch) and writes CUDA C++
//! (`emit`), NVRTC compiles that to PTX, `ptxas` assembles it and reports its [usage], and
//! `nvdisasm` lists the instructions, whose [memory accesses](sass) are parsed. [`checks`] finds
//! the defects.
//!
//! Without the feature `wgpu` the crate has no kernels, only parsers and checks.

pub mod aims;
pub mod arch;
pub mod bound;
pub mod checks;
#[cfg(feature = "wgpu")]
pub mod emit;
pub mod nvrtc;
pub mod sass;
pub mod table;
pub mod toolchain;
pub mod types;
pub mod usage;
