//! Tests every operation with a parameter. The gradients in a buffer are compared with the gradients from autodiff and
//! with gradients in f64.

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

/// A single buffer for all parameters. Parameter `i` is at `offset(i)`. With `separate`, gradients are computed as
/// separate tensors and then added to the buffer.
struct TestBuffer {
    flat: Mutex<Option<Tensor<1>>>,
    width: usize,
    add: bool,
    separate: bool,
}

impl TestBuffer {
    /// Creates a buffer for parameters of [`WIDTH`] elements.
    fn new(flat: Tensor<1>, add: bool) -> Self {
        Self {
            flat: Mutex::new(Some(flat)),
            width: WIDTH,
            add,
            separate: false,
        }
    }
}

/// The destination of a parameter's gradient.
#[derive(Clone)]
enum Use {
    /// The gradient goes to autodiff.
    Graph,
    /// The gradient goes to the buffer.
    Buffer(Arc<TestBuffer>),
    /// There is no gradient.
    Constant,
}

fn offset(parameter: usize, width: usize) -> usize {
    3 + parameter * (width + 5)
}

/// Returns a buffer for three parameters.
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

/// An operation on `x`, another tensor of the same shape, and up to three parameters.
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

/// Returns the operations, each with its number of parameters.
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
    // Values that every type holds exactly.
    let values: Vec<_> = values.iter().map(|x| (x * 32.0).round() / 32.0).collect();
    let data = TensorData::new(values, [count]).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// The gradients of all parameters go to autodiff.
const GRAPH: [Use; 3] = [const { Use::Graph }; 3];

/// Returns the gradient of `x`, and the gradients of the first `count` parameters if they go to autodiff.
fn gradients(
    run: Run,
    count: usize,
    shape: [usize; 2],
    (device, dtype): (&Device, DType),
    uses: [Use; 3],
) -> (Tensor<1>, Vec<Tensor<1>>) {
    let device = device.clone().autodiff();
    let rows = |phase| {
        let flat = wave(&shape, phase, &device, dtype).require_grad();
        (flat.clone(), flat.reshape(shape))
    };
    let ((leaf, x), (_, other)) = (rows(0.1), rows(0.2));
    let leaves =
        [0.3, 0.4, 0.5].map(|phase| wave(&shape[1..], phase, &device, dtype).require_grad());
    let parameter = |i: usize| {
        let constant = Parameter::from(leaves[i].clone().inner());
        match &uses[i] {
            Use::Graph => leaves[i].clone().into(),
            Use::Constant => constant,
            Use::Buffer(buffer) => Parameter {
                destination: Some(Destination {
                    parameter: i,
                    buffer: buffer.clone(),
                }),
                ..constant
            },
        }
    };
    let y = run([x, other], [0, 1, 2].map(parameter));
    let seed = wave(&shape, 0.6, &device, dtype).reshape(shape);
    let all = (y * seed).sum().backward();
    let found = leaves[..count].iter().zip(&uses).filter_map(|(leaf, of)| {
        let gradient = leaf.grad(&all);
        assert_eq!(gradient.is_some(), matches!(of, Use::Graph));
        gradient
    });
    (leaf.grad(&all).expect("it has a gradient"), found.collect())
}

/// Returns destinations with which the gradients of all parameters go to the buffer.
fn into(buffer: &Arc<TestBuffer>) -> [Use; 3] {
    [(); 3].map(|()| Use::Buffer(buffer.clone()))
}

fn doubles(x: Tensor<1>) -> Vec<f64> {
    let data = x.into_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("converted to f64")
}

/// Accumulates the gradients twice and compares the buffer with the gradients in f64.
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
    let (expected_x, _) = gradients(run, count, shape, on, GRAPH);
    for _ in 0..2 {
        let (of_x, _) = gradients(run, count, shape, on, into(&buffer));
        of_x.into_data()
            .assert_eq(&expected_x.clone().into_data(), true);
    }
    let (_, exact) = gradients(run, count, shape, (&Device::flex(), DType::F64), GRAPH);
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
    // Rows are computed in f32 from values in `dtype`, so a sum in f32 has only the error of its rows. A gradient that
    // is computed as a separate tensor may be rounded. If rows are read twice, their gradient is rounded before it is
    // summed.
    let rounded = separate || shape != SHAPE;
    // The sums have 75 products, each with a magnitude of at most 4.
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
            let buffer = Arc::new(TestBuffer::new(before.clone(), true));
            let on = (&device, dtype);
            let (_, graph) = gradients(run, count, SHAPE, on, GRAPH);
            gradients(run, count, SHAPE, on, into(&buffer));
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

/// A buffer that computes the gradients `self.0` times instead of once.
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
fn a_norm_refuses_a_tracked_parameter_next_to_a_destination() {
    let device = Device::flex().autodiff();
    let weight = Parameter {
        value: Tensor::ones([4], &device),
        destination: Some(Destination {
            parameter: 0,
            buffer: Arc::new(Wrong(1)),
        }),
    };
    let bias = Some(Tensor::zeros([4], &device).require_grad().into());
    let x = Tensor::<2>::ones([2, 4], &device);
    let work = || normalise(NormKind::Layer, x, weight, bias, NormOptions::new(1e-5));
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    let panic = panic.expect_err("the call must fail");
    insta::assert_snapshot!(
        panic.downcast_ref::<String>().unwrap(),
        @"layer_norm: invalid destinations = 1 for 2 trained parameters: expected one for each of them, or none"
    );
}

/// Some parameters are constants. The gradients of the other parameters have the same bits as if all parameters were
/// trained.
#[test]
fn constant_parameters_leave_the_gradients_of_the_others() {
    let device = Device::flex();
    let on = (&device, DType::F32);
    for (name, count, run) in operations() {
        let (of_x, of_all) = gradients(run, count, SHAPE, on, GRAPH);
        for trained in 0..1 << count {
            let is_trained = |parameter: usize| trained >> parameter & 1 == 1;
            for buffered in [false, true] {
                let to = Arc::new(TestBuffer::new(buffer(WIDTH, &device, DType::F32), false));
                let uses: [Use; 3] = std::array::from_fn(|parameter| match buffered {
                    _ if !is_trained(parameter) => Use::Constant,
                    true => Use::Buffer(to.clone()),
                    false => Use::Graph,
                });
                let (x, found) = gradients(run, count, SHAPE, on, uses);
                let what = format!("{name}, trained {trained:03b}, buffered {buffered}");
                assert_eq!(x.into_data(), of_x.clone().into_data(), "{what}");
                let mut found = found.into_iter();
                let flat = to.flat.lock().unwrap().take().expect("the buffer is there");
                for (parameter, expected) in of_all.iter().enumerate() {
                    let at = offset(parameter, WIDTH);
                    let found = match (is_trained(parameter), buffered) {
                        (false, _) => continue,
                        (true, true) => flat.clone().slice(at..at + WIDTH),
                        (true, false) => found.next().expect("it has a gradient"),
                    };
                    assert_eq!(found.into_data(), expected.clone().into_data(), "{what}");
                }
            }
        }
    }
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
