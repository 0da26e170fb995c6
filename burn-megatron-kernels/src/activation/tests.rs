use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, TensorData, f16};
use proptest::prelude::*;

use super::*;
use crate::testing::{Input, assert_gradients, compare, compare_within, devices, evaluate};

const KINDS: [Activation; 7] = [
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::QuickGelu,
    Activation::SquaredRelu,
    Activation::SwiGlu,
    Activation::GeGlu,
    Activation::QuickGeGlu,
];

const GPT_OSS: ActivationOptions = ActivationOptions {
    clamp: Some(1.25),
    offset: 1.0,
};

/// A test case: the inputs in addition to `x`, and the options.
#[derive(Clone, Debug)]
struct Case {
    rows: usize,
    /// Width of the output.
    width: usize,
    kind: Activation,
    options: ActivationOptions,
    bias: bool,
    weight: bool,
}

impl Case {
    fn new(rows: usize, width: usize, kind: Activation, bias: bool, weight: bool) -> Self {
        let options = ActivationOptions::default();
        Self {
            rows,
            width,
            kind,
            options,
            bias,
            weight,
        }
    }

    fn with(mut self, options: ActivationOptions) -> Self {
        self.options = options;
        self
    }

    /// Returns the width of `x`.
    fn wide(&self) -> usize {
        self.width * if self.kind.is_gated() { 2 } else { 1 }
    }

    fn inputs(&self) -> Vec<Input> {
        let mut inputs = vec![Input::wave([self.rows, self.wide()], 0.0)];
        if self.bias {
            inputs.push(Input::wave([self.wide()], 0.3).scaled(0.5, 0.1));
        }
        if self.weight {
            inputs.push(Input::wave([self.rows], 0.6).scaled(0.4, 0.5));
        }
        inputs
    }

    fn arguments(&self, leaves: &[Tensor<1>]) -> (Option<Tensor<1>>, Option<Tensor<1>>) {
        let mut rest = leaves[1..].iter().cloned();
        let bias = self.bias.then(|| rest.next()).flatten();
        (bias, self.weight.then(|| rest.next()).flatten())
    }

    fn fused(&self, leaves: &[Tensor<1>]) -> Tensor<1> {
        let x = leaves[0].clone().reshape([self.rows, self.wide()]);
        let (bias, weight) = self.arguments(leaves);
        let y = activate(x, bias, weight, self.kind, self.options);
        assert_eq!(y.dims(), [self.rows, self.width]);
        y.reshape([self.rows * self.width])
    }

    fn composed(&self, leaves: &[Tensor<1>]) -> Tensor<1> {
        let x = leaves[0].clone().reshape([self.rows, self.wide()]);
        let (bias, weight) = self.arguments(leaves);
        let y = composed::activate(x, bias, weight, self.kind, self.options);
        y.reshape([self.rows * self.width])
    }

    fn compare(&self) {
        let name = format!("{self:?}");
        // The gradient of the bias accumulates the rounding errors of all rows.
        compare_within(
            2.0,
            &name,
            &self.inputs(),
            |t| self.fused(t),
            |t| self.composed(t),
        );
    }
}

#[test]
fn every_kind_equals_its_composition() {
    for kind in KINDS {
        Case::new(3, 33, kind, false, false).compare();
        Case::new(3, 8, kind, true, true).compare();
    }
}

#[test]
fn every_width_is_taken() {
    for (width, kind) in [
        (1, Activation::SwiGlu),
        (7, Activation::Gelu),
        (1000, Activation::QuickGeGlu),
        (4097, Activation::SquaredRelu),
    ] {
        Case::new(3, width, kind, false, false).compare();
    }
    for (width, kind) in [(1, Activation::GeluTanh), (1000, Activation::GeGlu)] {
        Case::new(5, width, kind, true, false).compare();
        Case::new(5, width, kind, false, true).compare();
    }
    // A row spans several tiles, so that the gradient of the row weight is a sum of partial sums.
    Case::new(2, 4097, Activation::SwiGlu, true, true).compare();
}

#[test]
fn many_rows_are_summed_in_blocks() {
    Case::new(700, 33, Activation::SwiGlu, true, true).compare();
    Case::new(1100, 12, Activation::Gelu, true, false).compare();
}

#[test]
fn more_rows_than_one_dimension_of_cubes_are_taken() {
    let case = Case::new(70_000, 1, Activation::SquaredRelu, false, true);
    case.compare();
}

#[test]
fn clamp_and_offset_equal_their_composition() {
    for kind in [
        Activation::SwiGlu,
        Activation::GeGlu,
        Activation::QuickGeGlu,
    ] {
        Case::new(4, 16, kind, true, true).with(GPT_OSS).compare();
    }
    let options = ActivationOptions {
        clamp: None,
        offset: -0.5,
    };
    Case::new(4, 16, Activation::QuickGeGlu, false, false)
        .with(options)
        .compare();
    let options = ActivationOptions {
        clamp: Some(0.5),
        offset: 0.0,
    };
    Case::new(4, 16, Activation::SwiGlu, false, true)
        .with(options)
        .compare();
}

#[test]
fn gradients_are_those_of_differences() {
    for kind in KINDS {
        let case = Case::new(3, 4, kind, true, true);
        assert_gradients(&format!("{kind:?}"), &case.inputs(), |t| case.fused(t));
        let plain = Case::new(3, 4, kind, false, false);
        assert_gradients(&format!("plain {kind:?}"), &plain.inputs(), |t| {
            plain.fused(t)
        });
    }
    let case = Case::new(3, 5, Activation::QuickGeGlu, true, true).with(GPT_OSS);
    assert_gradients("clamped", &case.inputs(), |t| case.fused(t));
}

#[test]
fn only_tracked_inputs_get_gradients() {
    let case = Case::new(20, 12, Activation::SwiGlu, true, true);
    for tracked in [
        [true, false, false],
        [false, true, false],
        [false, false, true],
    ] {
        let some = |leaves: &[Tensor<1>]| -> Vec<Tensor<1>> {
            let pairs = leaves.iter().zip(tracked);
            pairs
                .map(|(t, keep)| if keep { t.clone() } else { t.clone().detach() })
                .collect()
        };
        let name = format!("tracked {tracked:?}");
        let (fused, composed) = (
            |t: &[_]| case.fused(&some(t)),
            |t: &[_]| case.composed(&some(t)),
        );
        compare(&name, &case.inputs(), fused, composed);
    }
}

#[test]
fn strided_and_sliced_inputs_are_taken() {
    type Run = fn(Tensor<3>, Option<Tensor<1>>) -> Tensor<3>;
    let inputs = [Input::wave([6, 10, 4], 0.0), Input::wave([12], 0.2)];
    let run = |leaves: &[Tensor<1>], run: Run| {
        let x = leaves[0].clone().reshape([6, 10, 4]).swap_dims(0, 1);
        let y = run(
            x.narrow(1, 1, 3).swap_dims(1, 2),
            Some(leaves[1].clone().narrow(0, 3, 3)),
        );
        y.reshape([10 * 4 * 3])
    };
    let kind = Activation::GeluTanh;
    let fused: Run = |x, bias| activate(x, bias, None, Activation::GeluTanh, Default::default());
    let plain: Run =
        |x, bias| composed::activate(x, bias, None, Activation::GeluTanh, Default::default());
    compare(
        &format!("strided {kind:?}"),
        &inputs,
        |t| run(t, fused),
        |t| run(t, plain),
    );
}

#[test]
fn an_empty_batch_gives_empty_gradients_and_a_zero_bias_gradient() {
    for (device, dtypes) in devices() {
        let case = Case::new(0, 8, Activation::SwiGlu, true, true);
        for run in [Case::fused, Case::composed] {
            let run = |leaves: &[Tensor<1>]| run(&case, leaves);
            let found = evaluate(&case.inputs(), &device, dtypes[0], dtypes[0], &run);
            assert!(found.output.is_empty() && found.gradients[0].is_empty());
            assert_eq!(found.gradients[1], vec![0.0; 16], "the bias");
        }
        let none = Tensor::<2>::zeros([5, 0], &device);
        let y = activate(none, None, None, Activation::SwiGlu, case.options);
        assert_eq!(y.dims(), [5, 0]);
    }
}

/// Inputs whose sums, squares or exponentials overflow. The expected values are computed in f64.
#[test]
fn large_values_give_the_limits_of_the_formulas() {
    let values = [65504.0, 1e4, 300.0, 24.5, 12.0, 5.0, 1e-4, 0.0];
    for kind in KINDS {
        let mut case = Case::new(1, 16, kind, false, false);
        // For larger numbers, the square would overflow in f16.
        let most = if kind == Activation::SquaredRelu {
            240.0
        } else {
            f64::INFINITY
        };
        let both = values
            .iter()
            .flat_map(|x| [f64::min(*x, most), -f64::min(*x, most)]);
        let linear = (0..16).map(|i| 1.0 + f64::from(i) * 0.0625);
        for clamp in [None, Some(7.0)] {
            case.options.clamp = clamp.filter(|_| kind.is_gated());
            let mut x: Vec<f64> = both.clone().collect();
            x.extend(linear.clone().filter(|_| kind.is_gated()));
            let inputs = [Input {
                shape: vec![1, case.wide()],
                values: x,
            }];
            assert_each(&case, &inputs);
        }
    }
}

/// Compares element by element, because otherwise large elements would hide errors of small elements.
fn assert_each(case: &Case, inputs: &[Input]) {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            let expected = evaluate(inputs, &Device::flex(), DType::F64, dtype, &|t| {
                case.composed(t)
            });
            let actual = evaluate(inputs, &device, dtype, dtype, &|t| case.fused(t));
            let tolerance = match dtype {
                DType::F64 => 1e-12,
                DType::F32 => 2e-6,
                DType::F16 => 2e-3,
                _ => 1e-2,
            };
            let pairs = [
                (&expected.output, &actual.output),
                (&expected.gradients[0], &actual.gradients[0]),
            ];
            for (what, (expected, actual)) in ["output", "gradient"].iter().zip(pairs) {
                for (i, (expected, actual)) in expected.iter().zip(actual).enumerate() {
                    let expected = match dtype {
                        DType::F16 => f16::from_f64(*expected).to_f64(),
                        _ => *expected,
                    };
                    let close = (expected - actual).abs() <= tolerance * (1.0 + expected.abs());
                    assert!(
                        close || expected == *actual,
                        "{case:?} in {dtype:?} on {device:?}: {what} {i} is {actual} and should \
                         be {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn nan_propagates_to_its_own_element_only() {
    for kind in KINDS {
        for clamp in [None, Some(2.0)] {
            let mut case = Case::new(2, 6, kind, false, false);
            case.options.clamp = clamp.filter(|_| kind.is_gated());
            let mut inputs = case.inputs();
            inputs[0].values[1] = f64::NAN;
            for (device, dtypes) in devices() {
                for dtype in dtypes {
                    let result = evaluate(&inputs, &device, dtype, dtype, &|t| case.fused(t));
                    let what = format!("{case:?} in {dtype:?} on {device:?}");
                    for (i, y) in result.output.iter().enumerate() {
                        assert_eq!(y.is_nan(), i == 1, "{what}: output {i} is {y}");
                    }
                    assert!(result.gradients[0][1].is_nan(), "{what}: the gradient");
                }
            }
        }
    }
}

#[test]
fn row_weights_may_have_another_type() {
    let inputs = Case::new(4, 8, Activation::SwiGlu, false, true).inputs();
    for (device, dtypes) in devices() {
        for dtype in dtypes.into_iter().filter(|dtype| dtype.size() == 2) {
            let device = device.clone().autodiff();
            let leaf = |input: &Input, dtype| {
                let data = TensorData::new(input.values.clone(), [input.values.len()]);
                Tensor::<1>::from_data(data.convert_dtype(dtype), (&device, dtype)).require_grad()
            };
            let (x, weight) = (leaf(&inputs[0], dtype), leaf(&inputs[1], DType::F32));
            let of = |run: fn(Tensor<2>, Tensor<1>) -> Tensor<2>| {
                let y = run(x.clone().reshape([4, 16]), weight.clone());
                assert_eq!(y.dtype(), dtype);
                let gradient = weight.grad(&y.sum().backward()).unwrap();
                assert_eq!(gradient.dtype(), DType::F32);
                gradient.into_data()
            };
            let kind = Activation::SwiGlu;
            assert!(kind.is_gated());
            let ours =
                of(|x, w| activate(x, None, Some(w), Activation::SwiGlu, Default::default()));
            let theirs = of(|x, w| {
                composed::activate(x, None, Some(w), Activation::SwiGlu, Default::default())
            });
            ours.assert_approx_eq(&theirs, burn::tensor::Tolerance::<f32>::relative(1e-4));
        }
    }
}

#[test]
fn results_are_the_same_on_any_number_of_threads() {
    let case = Case::new(900, 200, Activation::SwiGlu, true, true);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let inputs = case.inputs();
        pool.install(|| {
            evaluate(&inputs, &Device::flex(), DType::F32, DType::F32, &|t| {
                case.fused(t)
            })
        })
    };
    let (one, three) = (run(1), run(3));
    assert_eq!(one.output, three.output);
    assert_eq!(one.gradients, three.gradients);
}

fn message(work: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(work)).expect_err("must fail");
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(_) => panic!("the panic has no message"),
    }
}

#[test]
fn what_does_not_fit_is_named_alike_on_every_device() {
    for (device, _) in devices() {
        let check = |width, bias: Option<usize>, rows: Option<usize>, kind, options, expected| {
            let x = Tensor::<3>::zeros([2, 3, width], &device);
            let vector = |n| Tensor::<1>::zeros([n], &device);
            let (bias, weight) = (bias.map(vector), rows.map(vector));
            let fused = message(|| {
                activate(x.clone(), bias.clone(), weight.clone(), kind, options);
            });
            assert_eq!(fused, expected);
            let plain = message(|| {
                composed::activate(x, bias, weight, kind, options);
            });
            assert_eq!(plain, expected);
        };
        let (gelu, swiglu) = (Activation::Gelu, Activation::SwiGlu);
        let none = ActivationOptions::default();
        check(
            5,
            None,
            None,
            swiglu,
            none,
            "activate: SwiGlu takes two halves of the last dim, but [2, 3, 5] has an odd width of \
             5: expected an even one",
        );
        let expected = "activate: a bias [4] for x [2, 3, 8]: expected [8]";
        check(8, Some(4), None, swiglu, none, expected);
        let expected = "activate: row weights [3] for x [2, 3, 8]: expected [6]";
        check(8, None, Some(3), gelu, none, expected);
        let options = ActivationOptions {
            clamp: Some(1.0),
            offset: 0.0,
        };
        let expected = "activate: invalid clamp = 1 for Gelu: expected no clamp, or a gated \
                        activation";
        check(8, None, None, gelu, options, expected);
        let options = ActivationOptions {
            clamp: Some(-1.0),
            offset: 0.0,
        };
        let expected = "activate: invalid clamp = -1: expected a positive finite f32";
        check(8, None, None, swiglu, options, expected);
        let options = ActivationOptions {
            clamp: None,
            offset: 1.0,
        };
        let expected = "activate: invalid offset = 1 for Gelu: expected 0, or a gated activation";
        check(8, None, None, gelu, options, expected);
        let options = ActivationOptions {
            clamp: None,
            offset: f64::NAN,
        };
        let expected = "activate: invalid offset = NaN: expected a finite f32";
        check(8, None, None, swiglu, options, expected);
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    let numbers = (1usize..40, 1usize..70, 0.2f64..3.0, -1.0f64..1.0);
    (proptest::sample::select(&KINDS), flags, numbers).prop_map(
        |(kind, (bias, weight, clamped), (rows, width, clamp, offset))| {
            let gated = kind.is_gated();
            let options = ActivationOptions {
                clamp: (gated && clamped).then_some(clamp),
                offset: if gated { offset } else { 0.0 },
            };
            Case::new(rows, width, kind, bias, weight).with(options)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn drawn_cases_equal_their_composition(case in cases()) {
        let run = |dtype, operation: &dyn Fn(&[Tensor<1>]) -> Tensor<1>| {
            evaluate(&case.inputs(), &Device::flex(), dtype, DType::F32, &|t| operation(t))
        };
        let expected = run(DType::F64, &|t| case.composed(t));
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
            let actual = run(dtype, &|t| case.fused(t));
            let parts = [&expected, &actual].map(|e| [vec![e.output.clone()], e.gradients.clone()].concat());
            for (expected, actual) in parts[0].iter().zip(&parts[1]) {
                let largest = expected.iter().fold(1.0f64, |most, x| most.max(x.abs()));
                for (expected, actual) in expected.iter().zip(actual) {
                    prop_assert!((expected - actual).abs() <= tolerance * largest, "{case:?}");
                }
            }
        }
    }
}
