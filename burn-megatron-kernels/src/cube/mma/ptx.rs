//! The PTX instructions that the kernels use, with one function per instruction. Addresses of shared memory are in
//! bytes.
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA": `mma.m16n8k16`, `ldmatrix`, `cp.async`,
//! `ex2.approx`.

use cubecl::prelude::*;

/// The number of registers of a 16 by 16 fragment of 16-bit elements, and of a 16 by 8 tile of f32 sums.
pub(crate) type Quad = Const<4>;

/// Returns the address of a slice of shared memory.
#[cube]
pub(crate) fn shared_address(memory: &[Vector<u32, Quad>]) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 at; cvta.to.shared.u64 at, {start}; cvt.u32.u64 {address}, at; }}",
        start = in(_) unsafe { memory.as_ptr_unchecked() },
        address = out(_) address,
    );
    address
}

/// Starts to copy 16 bytes from global to shared memory. If `bytes` is 0, writes zeros.
#[cube]
pub(crate) fn copy_16_bytes<F: Float, N: Size>(from: &[Vector<F, N>], to: u32, bytes: u32) {
    gpu_asm!(
        "cp.async.cg.shared.global [{to}], [{from}], 16, {bytes};",
        from = in(_) unsafe { from.as_ptr_unchecked() },
        to = in(_) to,
        bytes = in(_) bytes,
    );
}

/// Starts to copy one f32 from global to shared memory. If `bytes` is 0, writes 0.
#[cube]
pub(crate) fn copy_4_bytes(from: &[f32], to: u32, bytes: u32) {
    gpu_asm!(
        "cp.async.ca.shared.global [{to}], [{from}], 4, {bytes};",
        from = in(_) unsafe { from.as_ptr_unchecked() },
        to = in(_) to,
        bytes = in(_) bytes,
    );
}

/// Ends a group of copies.
#[cube]
pub(crate) fn commit_copies() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until the copies of this unit are done, except for the last `pending` groups of copies.
#[cube]
pub(crate) fn wait_for_copies(#[comptime] pending: usize) {
    gpu_asm!("cp.async.wait_group {pending};", pending = const pending);
}

/// Loads four 8 by 8 matrices of 16-bit elements.
///
/// Lane `i` passes the address of row `i % 8` of matrix `i / 8`. The lane gets the columns `2 (i % 4)` and
/// `2 (i % 4) + 1` of row `i / 4` of each matrix. If `transposed` is true, the matrices are transposed first.
#[cube]
pub(crate) fn load_matrices(address: u32, #[comptime] transposed: bool) -> Vector<u32, Quad> {
    let suffix = comptime!(if transposed { ".trans" } else { "" });
    let matrices: Vector<u32, Quad>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {matrices}, [{address}];",
        suffix = const suffix,
        address = in(_) address,
        matrices = out(_) matrices,
    );
    matrices
}

/// Returns `sums + a b`. `a` is 16 by 16. `b` is one half (8 columns) of a 16 by 16 matrix, selected by `half`.
#[cube]
pub(crate) fn multiply(
    a: Vector<u32, Quad>,
    b: Vector<u32, Quad>,
    #[comptime] half: usize,
    sums: Vector<f32, Quad>,
    #[comptime] bf16: bool,
) -> Vector<f32, Quad> {
    let element = comptime!(element_name(bf16));
    let result: Vector<f32, Quad>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 {result}, {a}, {{{b0}, {b1}}}, {sums};",
        element = const element,
        a = in(_) a,
        b0 = in(_) b.extract(comptime!(2 * half)),
        b1 = in(_) b.extract(comptime!(2 * half + 1)),
        sums = in(_) sums,
        result = out(_) result,
        options(pure, nomem),
    );
    result
}

/// Returns two values rounded to 16 bits, the first in the lower half.
#[cube]
pub(crate) fn pack(first: f32, second: f32, #[comptime] bf16: bool) -> u32 {
    let element = comptime!(element_name(bf16));
    let packed: u32;
    gpu_asm!(
        "cvt.rn.{element}x2.f32 {packed}, {second}, {first};",
        element = const element,
        first = in(_) first,
        second = in(_) second,
        packed = out(_) packed,
        options(pure, nomem),
    );
    packed
}

/// Returns `2^x` with an error of at most 2 units in the last place. The result for minus infinity is 0.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    let power: f32;
    gpu_asm!(
        "ex2.approx.ftz.f32 {power}, {x};",
        x = in(_) x,
        power = out(_) power,
        options(pure, nomem),
    );
    power
}

/// Stores 4 bytes to shared memory.
#[cube]
pub(crate) fn store_shared(address: u32, value: u32) {
    gpu_asm!("st.shared.b32 [{address}], {value};", address = in(_) address, value = in(_) u32::reinterpret(value));
}

/// Loads 16 bytes from shared memory.
#[cube]
pub(crate) fn load_shared(address: u32) -> Vector<u32, Quad> {
    let value: Vector<u32, Quad>;
    gpu_asm!(
        "ld.shared.v4.b32 {value}, [{address}];",
        address = in(_) address,
        value = out(_) value,
    );
    value
}

/// Loads two adjacent f32 from shared memory.
#[cube]
pub(crate) fn load_pair(address: u32) -> Vector<f32, Const<2>> {
    let value: Vector<f32, Const<2>>;
    gpu_asm!(
        "ld.shared.v2.f32 {value}, [{address}];",
        address = in(_) address,
        value = out(_) value,
    );
    value
}

fn element_name(bf16: bool) -> &'static str {
    if bf16 { "bf16" } else { "f16" }
}
