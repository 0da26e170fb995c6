//! Every operation with a parameter, into a buffer, against the graph and against f64.

use std::sync::Mutex;

use burn::tensor::{Device, TensorData};

use super::*;
use crate::activation::{Activation, ActivationOptions, activate, activate_with};
use crate::dropout::{Draw, bias_dropout_add, bias_dropout_add_with};
use crate::norm::{NormKind, NormOptions, add_normalise, normalise};
use crate::testing::{Input, devices, tolerance};

const ROWS: usize = 75;
const WIDTH: usize = 40;
const SHAPE: [usize; 2] = [ROWS, WIDTH];

/// One buffer for all parameters: parameter `i` at `offset(i)`; or separate gradients.
struct TestBuffer {
    flat: Mutex<Option<Tensor<1>>>,
    width: usize,
    add: bool,
    separate: bool,
}

fn offset(parameter: usize, width: usize) -> usize {
    3 + parameter * (width + 5)
}

/// The values of a buffer of three parameters.
fn buffer(width: usize, device: &Device, dtype: DType) -> Tensor<1> {
    wave(&[offset(3, width)], 0.9, device, dtype)
}

impl GradientBuffer for TestBuffer {
    fn accumulate(&self, parameters: &[usize], compute: ComputeGradients<'_>) {
        let mut held = self.flat.lock().unwrap();
        let mut flat = held.take().expect("the buffer is there");
        let place = |parameter: &usize| Place {
            offset: offset(*parameter, self.width),
            add: self.add,
        };
        let places: Vec<_> = parameters.iter().map(place).collect();
        if self.separate {
            for (place, gradient) in places.iter().zip(compute(None)) {
                flat = crate::flat::accumulate(flat, place.offset, gradient, place.add);
            }
        } else {
            let mut results = compute(Some(FlatGradients { flat, places }));
            assert_eq!(results.len(), 1);
            flat = results.remove(0);
        }
        *held = Some(flat);
    }
}

/// An operation of `x`, another tensor of its shape, and up to three parameters.
type Run = fn([Tensor<2>; 2], [Parameter; 3]) -> Tensor<2>;

fn draw() -> Draw {
    Draw {
        probability: 0.25,
        key: 3,
        position: 1,
        first: 0,
        run: ROWS * WIDTH,
        pitch: 0,
    }
}

/// The operations, and how many of the parameters each has.
fn operations() -> Vec<(&'static str, usize, Run)> {
    const NORM: NormOptions = NormOptions {
        epsilon: 1e-5,
        zero_centered: false,
    };
    vec![
        ("layer norm", 2, |[x, _], [weight, bias, _]| {
            normalise(NormKind::Layer, x, weight, Some(bias), NORM)
        }),
        ("rms norm", 1, |[x, _], [weight, ..]| {
            normalise(NormKind::Rms, x, weight, None, NORM)
        }),
        ("add and layer norm", 2, |[x, other], [weight, bias, _]| {
            let (y, sum) = add_normalise(NormKind::Layer, x, None, other, weight, Some(bias), NORM);
            y + sum
        }),
        ("add and rms norm", 1, |[x, other], [weight, ..]| {
            add_normalise(NormKind::Rms, x, None, other, weight, None, NORM).0
        }),
        ("bias, add and layer norm", 3, |[x, other], parameters| {
            let [weight, bias, x_bias] = parameters;
            let (kind, x_bias) = (NormKind::Layer, Some(x_bias));
            let (y, sum) = add_normalise(kind, x, x_bias, other, weight, Some(bias), NORM);
            y + sum
        }),
        ("bias, add and rms norm", 2, |[x, other], parameters| {
            let [weight, x_bias, _] = parameters;
            let (kind, x_bias) = (NormKind::Rms, Some(x_bias));
            add_normalise(kind, x, x_bias, other, weight, None, NORM).0
        }),
        ("gelu", 1, |[x, _], [bias, ..]| {
            let options = ActivationOptions::default();
            activate_with(x, Some(bias), None, Activation::Gelu, options)
        }),
        ("swiglu", 1, |[x, _], [bias, ..]| {
            let options = ActivationOptions::default();
            let y = activate_with(x, Some(bias), None, Activation::SwiGlu, options);
            Tensor::cat(vec![y.clone(), y], 1)
        }),
        ("residual", 1, |[x, other], [bias, ..]| {
            bias_dropout_add_with(x, Some(bias), Some(other), None)
        }),
        ("dropout", 1, |[x, other], [bias, ..]| {
            bias_dropout_add_with(x, Some(bias), Some(other), Some(draw()))
        }),
    ]
}

fn wave(shape: &[usize], phase: f64, device: &Device, dtype: DType) -> Tensor<1> {
    let values = Input::wave(shape.to_vec(), phase).values;
    let count = values.len();
    // Values that every type has.
    let values: Vec<_> = values.iter().map(|x| (x * 32.0).round() / 32.0).collect();
    let data = TensorData::new(values, [count]).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// The gradients of `x` and of the parameters, which come from the graph or from a buffer.
fn gradients(
    run: Run,
    count: usize,
    shape: [usize; 2],
    (device, dtype): (&Device, DType),
    buffer: Option<Arc<TestBuffer>>,
) -> (Tensor<1>, Vec<Tensor<1>>) {
    let device = device.clone().autodiff();
    let rows = |phase| {
        let flat = wave(&shape, phase, &device, dtype).require_grad();
        (flat.clone(), flat.reshape(shape))
    };
    let ((leaf, x), (_, other)) = (rows(0.1), rows(0.2));
    let leaves: Vec<_> = [0.3, 0.4, 0.5]
        .map(|phase| wave(&shape[1..], phase, &device, dtype).require_grad())
        .into();
    let parameter = |i: usize| match &buffer {
        None => leaves[i].clone().into(),
        Some(buffer) => Parameter {
            value: leaves[i].clone().inner(),
            destination: Some(Destination {
                parameter: i,
                buffer: buffer.clone(),
            }),
        },
    };
    let y = run([x, other], [0, 1, 2].map(parameter));
    let seed = wave(&shape, 0.6, &device, dtype).reshape(shape);
    let all = (y * seed).sum().backward();
    let of = |leaf: &Tensor<1>| leaf.grad(&all).expect("it has a gradient");
    let of_parameters = match buffer {
        None => leaves[..count].iter().map(of).collect(),
        Some(_) => {
            assert!(leaves.iter().all(|leaf| leaf.grad(&all).is_none()));
            vec![]
        }
    };
    (of(&leaf), of_parameters)
}

fn doubles(x: Tensor<1>) -> Vec<f64> {
    let data = x.into_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("converted to f64")
}

/// Accumulates the gradients twice, and compares with what f64 gives.
fn check(
    (name, count, run): (&str, usize, Run),
    shape: [usize; 2],
    on: (&Device, DType),
    (add, separate): (bool, bool),
) {
    let ((device, dtype), [_, width]) = (on, shape);
    let what = format!("{name} in {dtype:?} on {device:?}, add {add}, separate {separate}");
    let before = buffer(width, device, wide(dtype));
    let buffer = Arc::new(TestBuffer {
        flat: Mutex::new(Some(before.clone())),
        width,
        add,
        separate,
    });
    let (expected_x, _) = gradients(run, count, shape, on, None);
    for _ in 0..2 {
        let (of_x, _) = gradients(run, count, shape, on, Some(buffer.clone()));
        of_x.into_data()
            .assert_eq(&expected_x.clone().into_data(), true);
    }
    let (_, exact) = gradients(run, count, shape, (&Device::flex(), DType::F64), None);
    let mut expected = doubles(before);
    for (parameter, gradient) in exact.into_iter().enumerate() {
        let at = offset(parameter, width);
        let at = at..at + width;
        for (to, gradient) in expected[at].iter_mut().zip(doubles(gradient)) {
            *to = if add { *to + 2.0 * gradient } else { gradient };
        }
    }
    let found = doubles(
        buffer
            .flat
            .lock()
            .unwrap()
            .take()
            .expect("the buffer is there"),
    );
    // Rows are computed from values in `dtype`, in f32, so that a sum has their error only. A sum by itself
    // may be rounded, and the gradient of rows that are read twice is rounded before it is summed.
    let rounded = separate || shape != SHAPE;
    // Sums of 75 products of up to 4.
    let tolerance = 150.0 * tolerance(if rounded { dtype } else { wide(dtype) });
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(
            (found - expected).abs() <= tolerance,
            "{what}: element {i} is {found} and should be {expected}"
        );
    }
}

#[test]
fn every_operation_adds_the_gradients_of_its_parameters_to_a_buffer() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for operation in operations() {
                for form in [(true, false), (false, false), (true, true)] {
                    check(operation, SHAPE, (&device, dtype), form);
                }
            }
        }
    }
}

#[test]
fn norms_of_rows_that_are_read_twice_do_so_too() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for operation in operations() {
                if operation.0.starts_with("bias, add") {
                    check(operation, [3, 20_000], (&device, dtype), (true, false));
                }
            }
        }
    }
}

#[test]
fn a_buffer_holds_the_bits_of_the_graph() {
    let device = Device::flex();
    for dtype in [DType::F32, DType::F64] {
        for (name, count, run) in operations() {
            let before = buffer(WIDTH, &device, dtype);
            let buffer = Arc::new(TestBuffer {
                flat: Mutex::new(Some(before.clone())),
                width: WIDTH,
                add: true,
                separate: false,
            });
            let on = (&device, dtype);
            let (_, graph) = gradients(run, count, SHAPE, on, None);
            gradients(run, count, SHAPE, on, Some(buffer.clone()));
            let parts = graph.into_iter().enumerate();
            let expected = parts.fold(before, |flat, (parameter, gradient)| {
                crate::flat::accumulate(flat, offset(parameter, WIDTH), gradient, true)
            });
            let found = buffer
                .flat
                .lock()
                .unwrap()
                .take()
                .expect("the buffer is there");
            assert_eq!(found.into_data(), expected.into_data(), "{name}");
        }
    }
}

/// A buffer that does not do what it must.
struct Wrong(usize);

impl GradientBuffer for Wrong {
    fn accumulate(&self, _: &[usize], compute: ComputeGradients<'_>) {
        for _ in 0..self.0 {
            compute(None);
        }
    }
}

#[test]
fn a_buffer_that_computes_no_gradient_or_two_is_an_error() {
    for (times, message) in [
        (0, "the gradients of parameters [7] were not computed"),
        (2, "the gradients of parameters [7] were computed twice"),
    ] {
        let destination = Destination {
            parameter: 7,
            buffer: Arc::new(Wrong(times)),
        };
        let work = || accumulate(&[&destination], |_| ((), vec![]));
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        let panic = panic.expect_err("the call must fail");
        assert_eq!(panic.downcast_ref::<String>().unwrap(), message);
    }
}

#[test]
fn a_norm_delivers_all_of_its_parameters_or_none() {
    let device = Device::flex();
    let weight = Parameter {
        value: Tensor::ones([4], &device),
        destination: Some(Destination {
            parameter: 0,
            buffer: Arc::new(Wrong(1)),
        }),
    };
    let bias = Some(Tensor::zeros([4], &device).into());
    let x = Tensor::<2>::ones([2, 4], &device);
    let work = || normalise(NormKind::Layer, x, weight, bias, NormOptions::new(1e-5));
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    let panic = panic.expect_err("the call must fail");
    assert_eq!(
        panic.downcast_ref::<String>().unwrap(),
        "layer_norm: invalid destinations = of 1 of 2 parameters: expected those of all parameters, or none"
    );
}

#[test]
fn functions_with_tensors_are_those_with_parameters() {
    let device = Device::flex();
    let rows = || wave(&SHAPE, 0.1, &device, DType::F32).reshape(SHAPE);
    let bias = || wave(&[WIDTH], 0.3, &device, DType::F32);
    let (kind, options) = (Activation::Gelu, ActivationOptions::default());
    let plain: Tensor<2> = activate(rows(), Some(bias()), None, kind, options);
    let other = activate_with(rows(), Some(bias().into()), None, kind, options);
    assert_eq!(plain.into_data(), other.into_data());
    let plain: Tensor<2> = bias_dropout_add(rows(), Some(bias()), None, Some(draw()));
    let other = bias_dropout_add_with(rows(), Some(bias().into()), None, Some(draw()));
    assert_eq!(plain.into_data(), other.into_data());
}
