//! Tests with several threads, with invalid arguments and with random cases.

use proptest::prelude::*;

use super::*;

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let inputs = leaves(700, 100, 1);
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let ours = layer!(layer_norm, OPTIONS);
        pool.install(|| evaluate(&inputs, &Device::flex(), DType::F32, DType::F32, &ours))
    };
    let (one, three) = (run(1), run(3));
    assert_eq!(one.output, three.output);
    assert_eq!(one.gradients, three.gradients);
}

fn message(work: impl FnOnce() + std::panic::UnwindSafe) -> String {
    let panic = std::panic::catch_unwind(work).expect_err("this must fail");
    *panic.downcast::<String>().expect("a message")
}

#[test]
fn mistakes_are_named_on_every_device() {
    for (device, _) in devices() {
        let x = |dims: [usize; 2], dtype| Tensor::<2>::ones(dims, (&device, dtype));
        let w = |size: usize| Tensor::<1>::ones([size], &device);
        let f32 = DType::F32;
        let refused = [
            (
                message(|| drop(rms_norm(x([2, 8], f32), w(7), OPTIONS))),
                "rms_norm: the weight is [7] and x is [2, 8]: expected a weight [8]",
            ),
            (
                message(|| drop(layer_norm(x([2, 8], f32), w(8), Some(w(1)), OPTIONS))),
                "layer_norm: the bias is [1] and x is [2, 8]: expected a bias [8]",
            ),
            (
                message(|| {
                    let bias = Some(w(7).into());
                    let (x, weight) = (x([2, 8], f32), w(8).into());
                    let kind = NormKind::Rms;
                    drop(add_normalise(
                        kind,
                        x.clone(),
                        bias,
                        x,
                        weight,
                        None,
                        OPTIONS,
                    ));
                }),
                "add_rms_norm: the bias of x is [7] and x is [2, 8]: expected a bias of x [8]",
            ),
            (
                message(|| drop(layer_norm(x([2, 0], f32), w(0), None, OPTIONS))),
                "layer_norm: x [2, 0] has no elements in its last dim: expected 1 or more",
            ),
            (
                message(|| drop(rms_norm(x([2, 8], f32), w(8), NormOptions::new(-1.0)))),
                "rms_norm: invalid epsilon = -1: expected a small positive number",
            ),
            (
                message(|| {
                    drop(add_rms_norm(x([2, 8], f32), x([8, 2], f32), w(8), OPTIONS));
                }),
                "add_rms_norm: the residual is [8, 2] and x is [2, 8]: expected equal shapes",
            ),
            (
                message(|| {
                    let narrow = x([2, 8], DType::F16);
                    drop(add_layer_norm(x([2, 8], f32), narrow, w(8), None, OPTIONS));
                }),
                "add_layer_norm: invalid type of the residual = F16 with x in F32: expected the type of x, or F32 if x \
                 is F16 or BF16",
            ),
        ];
        for (actual, expected) in refused {
            assert_eq!(actual, expected);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn drawn_shapes_agree_on_the_cpu(
        rows in 1usize..40,
        width in 2usize..200,
        zero_centered: bool,
        phase in 0.0f64..1.0,
    ) {
        let options = NormOptions { epsilon: 1e-3, zero_centered };
        let mut inputs = leaves(rows, width, 2);
        inputs[0] = Input::wave([rows, width], phase);
        let ours = evaluate(
            &inputs,
            &Device::flex(),
            DType::F64,
            DType::F64,
            &add_layer!(add_layer_norm, options),
        );
        let theirs = evaluate(
            &inputs,
            &Device::flex(),
            DType::F64,
            DType::F64,
            &add_layer!(composed::add_layer_norm, options),
        );
        let pairs = ours.gradients.iter().zip(&theirs.gradients);
        for (ours, theirs) in pairs.chain([(&ours.output, &theirs.output)]) {
            for (ours, theirs) in ours.iter().zip(theirs) {
                prop_assert!((ours - theirs).abs() < 1e-9 * (1.0 + theirs.abs()));
            }
        }
    }
}
