//! AdamW uses one compiled kernel for all step parameters. This test has its own process, because launches are counted
//! on all threads.
#![cfg(feature = "wgpu")]

use burn::tensor::{Device, Tensor};
use burn_megatron_kernels::adamw::{AdamWBuffers, AdamWStep, Decay, adamw};
use cubecl::launched::LaunchedKernels;

#[test]
fn numbers_of_a_step_are_no_part_of_the_kernel() {
    let device = Device::wgpu(Default::default());
    let zeros = || Tensor::<1>::zeros([256], &device);
    let mut buffers = AdamWBuffers {
        master: zeros(),
        first: zeros(),
        second: zeros(),
    };
    let mut gradients = (1..=10).map(|i| Tensor::<1>::full([256], i as f32, &device));
    let collected: Vec<_> = gradients.by_ref().collect();
    device.sync().expect("the device works");
    let launched = LaunchedKernels::new();
    for (step, gradient) in (1..).zip(collected) {
        let step = AdamWStep {
            rate: 0.1 / step as f64,
            beta1: 0.9 - 0.01 * step as f64,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.01 * step as f64,
            step,
            gradient_scale: 1.0 / step as f64,
        };
        (buffers, _) = adamw(buffers, gradient, &Decay::All, &step, None);
    }
    device.sync().expect("the device works");
    assert_eq!(launched.finish().len(), 1);
    assert!(buffers.master.sum().into_scalar::<f32>() < 0.0);
}
