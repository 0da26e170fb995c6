//! Compiles every CubeCL kernel of `burn-megatron-kernels` to machine code with no GPU, and judges
//! it.
//!
//! The way of one kernel: CubeCL expands it for an [architecture](arch) and writes CUDA C++
//! (`emit`), NVRTC compiles that to PTX, `ptxas` assembles it and says what it uses ([`usage`]), and
//! `nvdisasm` lists the instructions, whose [memory accesses](sass) are read. The
//! [`verdict`] says what is wrong with it.
//!
//! Without the feature `wgpu` the crate holds no kernels, only what reads and judges.

pub mod aims;
pub mod arch;
pub mod bound;
#[cfg(feature = "wgpu")]
pub mod emit;
pub mod nvrtc;
pub mod sass;
pub mod table;
pub mod toolchain;
pub mod types;
pub mod usage;
pub mod verdict;
