//! Tests that the memory report counts the allocations of a step, and names growing memory.

use std::cell::RefCell;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_megatron_verify::memory_report::{MemoryReport, MemoryReportError, memory_report};

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

const WIDTH: usize = 64;
const ROWS: usize = 256;
const LAYERS: usize = 3;

impl Net {
    fn new() -> Self {
        let linear = |_| {
            LinearConfig::new(WIDTH, WIDTH)
                .with_bias(false)
                .init(&Device::flex())
        };
        Self {
            layers: (0..LAYERS).map(linear).collect(),
        }
    }

    fn loss(&self, x: &Tensor<2>) -> Tensor<1> {
        let layers = self.layers.iter();
        layers
            .fold(x.clone(), |x, layer| layer.forward(x).tanh())
            .sum()
    }
}

fn report(loss: impl FnMut(&Net, &Tensor<2>) -> Tensor<1>) -> MemoryReport {
    let x = Tensor::ones([ROWS, WIDTH], &Device::flex());
    let report = memory_report(&Net::new(), &x, loss, &Device::flex(), 5).unwrap();
    println!("{report}");
    report
}

#[test]
fn a_step_is_measured_and_leaves_nothing() {
    let _alone = super::ALONE.lock();
    let report = report(Net::loss);
    let (weight, activation) = ((4 * WIDTH * WIDTH) as u64, (4 * ROWS * WIDTH) as u64);
    assert_eq!(report.gradients, LAYERS as u64 * weight);
    let paths: Vec<_> = report
        .parameters
        .iter()
        .map(|it| (&it.0[..], it.1))
        .collect();
    assert_eq!(paths[1], ("layers.1.weight", weight));
    // The product and its tanh.
    assert_eq!(report.by_module()["layers.1"], [weight, 2 * activation]);
    // One or two outputs of each layer.
    let kept = report.kept as f64 / (LAYERS as u64 * activation) as f64;
    assert!((0.9..2.1).contains(&kept), "{kept}");
    assert!(report.forward_peak >= report.kept && report.backward_peak > report.kept);
    assert_eq!(report.growth, None, "{report}");
}

#[inline(never)]
fn remember(all: &RefCell<Vec<Vec<f32>>>) {
    all.borrow_mut().push(vec![1.0; 5000]);
}

#[test]
fn what_grows_is_named_with_its_place() {
    let _alone = super::ALONE.lock();
    let all = RefCell::new(vec![]);
    let report = report(|net, x| {
        remember(&all);
        net.loss(x)
    });
    let growth = report.growth.as_ref().unwrap();
    assert!(
        (20_000..25_000).contains(&growth.bytes_per_step),
        "{report}"
    );
    let (bytes, place) = &growth.places[0];
    assert!(*bytes >= 20_000 && place.contains("remember"), "{report}");
}

#[test]
fn too_few_steps_are_refused() {
    let x = Tensor::ones([1, WIDTH], &Device::flex());
    let error = memory_report(&Net::new(), &x, Net::loss, &Device::flex(), 2);
    assert_eq!(error.unwrap_err(), MemoryReportError::Steps(2));
}
