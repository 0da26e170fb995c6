//! Kernels for ahead-of-time compilation without a device.
//!
//! [`aot_instances`] lists the kernels of all operations, for every element type and for typical sizes. `cargo xtask
//! check-cuda` compiles these kernels to machine code.

use crate::cube::instance::AotList;
pub use crate::cube::instance::{AotInstance, AotTarget};

/// Returns all kernels of the crate for one compilation target.
pub fn aot_instances(target: AotTarget) -> Vec<AotInstance> {
    let operations = [
        crate::activation::kernel::aot_instances,
        crate::adamw::aot_instances,
        crate::attention::kernel::aot_instances,
        crate::column_sum::kernel::aot_instances,
        crate::cross_entropy::kernel::aot_instances,
        crate::dropout::kernel::aot_instances,
        crate::embedding::kernel::aot_instances,
        crate::flat::kernel::aot_instances,
        crate::fp8::codec::aot_instances,
        crate::fp8::delayed::kernel::aot_instances,
        crate::fp8::matrix::kernel::aot_instances,
        crate::fp8::product::scales::kernel::aot_instances,
        crate::fp8::quantize::kernel::aot_instances,
        crate::moe::capacity::kernel::aot_instances,
        crate::moe::destinations::kernel::aot_instances,
        crate::moe::grouped::mma::aot_instances,
        crate::moe::permutation::gather::kernel::aot_instances,
        crate::moe::permutation::sort::kernel::aot_instances,
        crate::moe::permutation::words::kernel::aot_instances,
        crate::moe::router::kernel::aot_instances,
        crate::moe::statistics::kernel::aot_instances,
        crate::norm::kernel::aot_instances,
        crate::rope::kernel::aot_instances,
        crate::softmax::kernel::aot_instances,
    ];
    let all = vec![];
    let mut list = AotList { target, all };
    for add in operations {
        add(&mut list);
    }
    list.all
}
