//! Writing into a flat buffer takes one kernel, in place. This test has its own process, because kernels are collected
//! on all threads.
#![cfg(feature = "wgpu")]

use burn::tensor::{Device, Tensor};
use burn_megatron_kernels::flat::accumulate;
use cubecl::launched::LaunchedKernels;

#[test]
fn a_uniquely_owned_buffer_takes_one_kernel_and_a_shared_one_a_copy() {
    let device = Device::wgpu(Default::default());
    let kernels = |held: bool, offset: usize| {
        let flat = Tensor::<1>::ones([300], &device);
        let values = Tensor::<1>::ones([64], &device);
        let other = held.then(|| flat.clone());
        device.sync().expect("the device works");
        let launched = LaunchedKernels::new();
        let sum = accumulate(flat, offset, values, true);
        device.sync().expect("the device works");
        let count = launched.finish().len();
        assert_eq!(sum.sum().into_scalar::<f32>(), 364.0);
        drop(other);
        count
    };
    for offset in [0, 3, 64, 236] {
        assert_eq!(kernels(false, offset), 1);
        assert_eq!(kernels(true, offset), 2);
    }
}
