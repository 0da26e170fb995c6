//! Tests weights whose gradient was always 0.

use super::*;

/// The gradient and the moments of unused rows of an embedding are 0.
#[test]
fn an_epsilon_of_zero_leaves_what_was_never_used_to_its_decay() {
    let length = 2 * DECAY_BLOCK + 5;
    let step = AdamWStep {
        epsilon: 0.0,
        gradient_scale: 1.0,
        ..numbers(3)
    };
    let gradient = |device: &Device, dtype| {
        let used = (0..length).map(|i| if i % 3 == 0 { 0.5 } else { 0.0 });
        let data = TensorData::new(used.collect::<Vec<f64>>(), [length]).convert_dtype(dtype);
        Tensor::<1>::from_data(data, (device, dtype))
    };
    for (device, dtypes) in devices() {
        let types = [DType::F32, DType::F64].into_iter();
        for dtype in types.filter(|dtype| dtypes.contains(dtype) || *dtype == DType::F32) {
            let fresh = || AdamWBuffers {
                master: Tensor::ones([length], (&device, dtype)),
                first: Tensor::zeros([length], (&device, dtype)),
                second: Tensor::zeros([length], (&device, dtype)),
            };
            for decay in decays(length, &device) {
                for step_of in [adamw, composed::adamw] {
                    let (after, copy) =
                        step_of(fresh(), gradient(&device, dtype), &decay, &step, None);
                    assert!(copy.is_none());
                    let (still, _) = step_of(
                        fresh(),
                        Tensor::zeros([length], (&device, dtype)),
                        &decay,
                        &step,
                        None,
                    );
                    let (after, still) = (doubles(&after.master), doubles(&still.master));
                    for (i, (after, still)) in after.iter().zip(&still).enumerate() {
                        let what = format!("{dtype:?}, element {i}: {after}, {still}");
                        assert!(after.is_finite() && still.is_finite(), "{what}");
                        // Only weight decay changes these weights. It removes at most the fraction
                        // `rate * weight_decay`, or twice this value in a block with a learning rate factor of 2.
                        let least = 1.0 - 2.0 * step.rate * step.weight_decay - 1e-6;
                        assert!((least..=1.0).contains(still), "{what}");
                        if i % 3 != 0 {
                            assert_eq!(after, still, "{what}");
                        }
                    }
                    assert!(after[0] < still[0] || matches!(decay, Decay::Blocks(_)));
                }
            }
        }
    }
}
