//! Collectives on plain tensors, and the types that they send.

use burn::tensor::{DType, Device};

use super::super::*;
use super::{integers, over, own, tensor};
use crate::comm::ReduceOp;

#[test]
fn every_reduction_is_to_be_had() {
    over(4, |comm| {
        let reduced = |op| {
            let x = tensor(&own(comm.rank(), 2), [2], &Device::flex(), DType::F32);
            integers(start_all_reduce(x * 4.0, op, &comm).wait())
        };
        // The values are 4, 8, 16 and 32, and twice these values.
        assert_eq!(reduced(ReduceOp::Sum), [60, 120]);
        assert_eq!(reduced(ReduceOp::Average), [15, 30]);
        assert_eq!(reduced(ReduceOp::Max), [32, 64]);
        assert_eq!(reduced(ReduceOp::Min), [4, 8]);
    });
}

#[test]
fn collectives_may_be_waited_for_in_any_order() {
    over(3, |comm| {
        let x = || tensor(&own(comm.rank(), 3), [1, 3], &Device::flex(), DType::F64);
        let sum = start_all_reduce(x(), ReduceOp::Sum, &comm);
        let parts = start_reduce_scatter(x(), 1, &comm);
        let whole = start_all_gather(x(), 1, &comm);
        assert_eq!(integers(whole.wait()), [1, 2, 3, 2, 4, 6, 4, 8, 12]);
        assert_eq!(integers(sum.wait()), [7, 14, 21]);
        assert_eq!(integers(parts.wait()), [7 * (comm.rank() as i64 + 1)]);
    });
}

#[test]
fn tensors_come_back_from_buffers_as_they_were() {
    let device = Device::flex();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let x = tensor(&own(0, 6), [2, 3], &device, dtype);
        // A view that is not contiguous.
        let turned = x.transpose();
        let back = from_buffer(to_buffer(turned.clone()), [3, 2], &device, dtype);
        assert_eq!(back.dtype(), dtype);
        back.into_data().assert_eq(&turned.into_data(), true);
    }
}
