//! Large element-wise kernels are measured once. They give the same bits as small kernels, which are not measured. This
//! test has its own process, because kernels are collected on all threads.
#![cfg(feature = "wgpu")]

use burn::tensor::{Device, Distribution, Tensor};
use burn_megatron_kernels::activation::{Activation, ActivationOptions, activate};
use burn_megatron_kernels::dropout::{Draw, bias_dropout_add};
use burn_megatron_kernels::rope::{Positions, RopeConfig, RopeOptions, RopeTable, Scaling, rotate};
use cubecl::launched::LaunchedKernels;

const ROWS: usize = 1024;
const WIDTH: usize = 1024;

/// The minimum number of different kernels in a measured call: one per split.
const SPLITS: usize = 5;

/// Returns the result of `work` and the number of different kernels that it launches.
fn kernels<const D: usize>(
    device: &Device,
    work: impl FnOnce() -> Tensor<D>,
) -> (Tensor<D>, usize) {
    device.sync().expect("the device works");
    let launched = LaunchedKernels::new();
    let result = work();
    device.sync().expect("the device works");
    (result, launched.finish().len())
}

fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    let values: Vec<f32> = tensor.into_data().try_into_vec().expect("values in f32");
    values.into_iter().map(f32::to_bits).collect()
}

/// Checks an operation on fresh values of `rows` rows, from row `first`. The complete rows are measured once. The
/// halves are not measured.
fn check<const D: usize>(
    name: &str,
    device: &Device,
    rows: usize,
    operation: impl Fn(usize, usize) -> (Tensor<D>, usize),
) {
    let (first, measured) = operation(0, rows);
    assert!(measured >= SPLITS, "{name}: {measured} kernels");
    let whole = bits(first);
    for _ in 0..2 {
        let (again, launched) = operation(0, rows);
        assert_eq!(launched, 1, "{name}: kernels, measured before");
        assert!(bits(again) == whole, "{name}: bits of a second call");
    }
    let half = rows / 2;
    let halves = [0, half].map(|first| operation(first, half));
    assert_eq!(
        halves.each_ref().map(|half| half.1),
        [1, 1],
        "{name}: kernels of halves"
    );
    let halves = halves.map(|half| bits(half.0)).concat();
    assert!(halves == whole, "{name}: bits of the halves");
    device.sync().expect("the device works");
}

#[test]
fn large_kernels_are_measured_once_and_keep_their_bits() {
    let device = Device::wgpu(Default::default());
    let normal = |width| Tensor::<2>::random([ROWS, width], Distribution::Default, &device) - 0.5;
    let [wide, narrow] = [normal(2 * WIDTH), normal(WIDTH)];
    let rows = |x: &Tensor<2>, first, count| {
        let part = x.clone().narrow(0, first, count);
        // The product has its own memory.
        part * 1.0
    };

    check("forward", &device, ROWS, |first, count| {
        let x = rows(&wide, first, count);
        let (kind, options) = (Activation::SwiGlu, ActivationOptions::default());
        kernels(&device, || activate(x, None, None, kind, options))
    });
    check("dropout", &device, ROWS, |first, count| {
        let [x, residual] = [&narrow, &narrow].map(|x| rows(x, first, count));
        let draw = Draw {
            probability: 0.1,
            key: 7,
            position: 3,
            first: (first * WIDTH) as u64,
            run: count * WIDTH,
            pitch: 0,
        };
        kernels(&device, || {
            bias_dropout_add(x, None, Some(residual), Some(draw))
        })
    });
    let config = RopeConfig {
        width: 64,
        max_positions: ROWS,
        base: 1e4,
        scaling: Scaling::None,
    };
    let table = RopeTable::new(&config, &device, narrow.dtype()).expect("a table");
    for held in [false, true] {
        // A uniquely owned tensor is rotated in place. The measured trials must not rotate it.
        check(
            &format!("rope, held {held}"),
            &device,
            ROWS,
            |first, count| {
                let x = rows(&narrow, first, count).reshape([1, count, WIDTH / 64, 64]);
                let other = held.then(|| x.clone());
                let (positions, options) = (Positions::From(first), RopeOptions::default());
                let turned = kernels(&device, || rotate(x, &table, &positions, &options));
                drop(other);
                turned
            },
        );
    }
    check_gradients(&device);
}

/// The gradient of an activation's input has its own kernel launch.
fn check_gradients(device: &Device) {
    let device = device.clone().autodiff();
    let x = Tensor::<2>::random([ROWS, WIDTH], Distribution::Default, &device) - 0.5;
    let gradient = |first, count| {
        let part = x.clone().narrow(0, first, count);
        let part = part.detach().require_grad();
        let options = ActivationOptions::default();
        let y = activate(part.clone(), None, None, Activation::GeluTanh, options).sum();
        let backward = || {
            let gradients = y.backward();
            part.grad(&gradients).expect("a gradient")
        };
        let (gradient, launched) = kernels(&device, backward);
        (bits(gradient), launched)
    };
    let (whole, measured) = gradient(0, ROWS);
    let (again, launched) = gradient(0, ROWS);
    assert!(
        measured >= launched + SPLITS - 1,
        "gradient: {measured} kernels, then {launched}"
    );
    assert!(again == whole, "gradient: bits of a second call");
    let half = ROWS / 2;
    let halves = [0, half].map(|first| gradient(first, half));
    let counts = halves.each_ref().map(|half| half.1);
    assert_eq!(counts, [launched; 2], "gradient: kernels of halves");
    let halves = halves.map(|half| half.0).concat();
    assert!(halves == whole, "gradient: bits of the halves");
}
