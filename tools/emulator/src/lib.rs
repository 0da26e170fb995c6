//! A CUDA driver without a GPU.
//!
//! Programs that open `libcuda.so.1` find this library instead. NVIDIA's own compiler (NVRTC) makes
//! PTX of their kernels as ever; here it is [parsed](ptx), [lowered](lower) to steps, and
//! [run](machine) warp by warp on the CPU, in the order of PTX's rules for threads that part and
//! meet again.
//!
//! Accesses that a GPU lets pass are errors here: an address outside of every allocation or not aligned, two warps that
//! touch the same shared memory with no barrier between, a barrier that not all threads reach. What a GPU does not tell
//! is counted: instructions, sectors of global memory, conflicts of banks.
//!
//! It is as exact as PTX's specification is: functions that it only bounds (`ex2.approx`) are
//! computed in f64 and rounded. It says nothing of time.
//!
//! The device is an H200 of compute capability 9.0. These variables of the environment change it:
//!
//! - `BURN_MEGATRON_EMULATOR_MEMORY`: its memory in GiB; 16 if nothing is said.
//! - `BURN_MEGATRON_EMULATOR_STREAMS=lazy`: work of a stream is done when somebody waits for it, and
//!   no earlier: a wait between streams that a program lacks shows. Without it, work is done at the
//!   call.
//! - `BURN_MEGATRON_EMULATOR_COUNTS`: a file to which each launch appends its numbers, as a line of
//!   JSON with the field `kernel`. Other lines have `product` (of cuBLASLt), `copy` (`htod`, `dtoh`,
//!   `dtod`), `fill` (bytes) or `wait`: the call by which the host waits for the device.
//! - `BURN_MEGATRON_EMULATOR_PRODUCTS=fill`: products of cuBLASLt are checked and counted, but not
//!   computed: their results are filled with a small constant.
//! - `BURN_MEGATRON_EMULATOR_CLOCK=fixed`: any two events are a millisecond apart, so that no choice
//!   depends on the time of the host.
//! - `BURN_MEGATRON_EMULATOR_PTX`: a folder to which the text of each kernel is written, whose lines
//!   messages name.
//! - `BURN_MEGATRON_EMULATOR_CHECKS`: what is looked for beside bad addresses, separated by commas, of
//!   `races`, `lanes`, `unwritten` and `conflicts` ([`Checks`](machine::Checks)), or `none`;
//!   `races` by default.
//! - `BURN_MEGATRON_EMULATOR_THREADS`: threads of the host that run blocks; one for each core if
//!   nothing is said. Results are the same for any number.

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
