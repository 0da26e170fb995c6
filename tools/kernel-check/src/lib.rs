//! Compiles every CubeCL kernel of `burn-megatron-kernels` to machine code without a GPU, and checks the machine
//! code.
//!
//! Each kernel passes the following steps. CubeCL expands the kernel for an [architecture](arch) and writes CUDA C++
//! (`emit`). NVRTC compiles the CUDA C++ to PTX. `ptxas` assembles the PTX and reports its resource [usage].
//! `nvdisasm` lists the instructions, and the [memory accesses](sass) are parsed from the listing. [`checks`] finds
//! the defects.
//!
//! CubeCL calls a thread a unit, a warp a plane, and a thread block a cube.
//!
//! Without the feature `wgpu` the crate contains no kernels, only parsers and checks.

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
