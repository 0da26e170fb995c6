//! A CUDA driver that runs kernels without a GPU.
//!
//! Programs that open `libcuda.so.1` load this library instead. NVIDIA's own compiler (NVRTC) compiles their kernels
//! to PTX as usual. The emulator [parses](ptx) the PTX, [lowers](lower) it to steps, and [runs](machine) the steps
//! warp by warp on the CPU. Threads diverge and reconverge by the rules of PTX.
//!
//! The emulator reports errors that a GPU does not report: an address that is unaligned or outside of every
//! allocation, two warps that access the same shared memory without a barrier, and a barrier that not all threads
//! reach. It also counts instructions, sectors of global memory, and bank conflicts, which a GPU does not report.
//!
//! Results are as exact as the specification of PTX. If the specification only bounds the error of a function
//! (`ex2.approx`), the function is computed in f64 and rounded. The emulator does not model time.
//!
//! The device is an H200 of compute capability 9.0. Environment variables change its behaviour:
//!
//! - `BURN_MEGATRON_EMULATOR_MEMORY`: the device memory in GiB. The default is 16.
//! - `BURN_MEGATRON_EMULATOR_STREAMS=lazy`: work on a stream runs only when a call waits for it. A missing wait
//!   between streams then changes the results. By default, work runs at the call.
//! - `BURN_MEGATRON_EMULATOR_COUNTS`: a file to which each launch appends its counts, as a line of JSON with the
//!   field `kernel`. Other lines have the field `product` (of cuBLASLt), `copy` (`htod`, `dtoh`, `dtod`), `fill`
//!   (bytes) or `wait` (the call in which the host waits for the device).
//! - `BURN_MEGATRON_EMULATOR_PRODUCTS=fill`: products of cuBLASLt are checked and counted, but not computed. Their
//!   results are filled with a small constant.
//! - `BURN_MEGATRON_EMULATOR_CLOCK=fixed`: all pairs of events are one millisecond apart, so that no decision depends
//!   on the host's clock.
//! - `BURN_MEGATRON_EMULATOR_PTX`: a folder to which the PTX of each kernel is written. Messages refer to its lines.
//! - `BURN_MEGATRON_EMULATOR_CHECKS`: checks in addition to bad addresses, separated by commas: `races`, `lanes`,
//!   `unwritten` and `conflicts` ([`Checks`](machine::Checks)), or `none`. The default is `races`.
//! - `BURN_MEGATRON_EMULATOR_THREADS`: the number of host threads that run blocks. The default is one thread per
//!   core. The results do not depend on this number.

pub mod cublaslt;
mod driver;
mod element;
pub mod lower;
pub mod machine;
pub mod memory;
pub mod nccl;
pub mod ptx;
pub mod tensor_map;
#[cfg(test)]
pub(crate) mod testing;
