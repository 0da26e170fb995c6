use burn::tensor::{DType, Device, Tensor, TensorData, bf16, f16};

/// An input of a test with its values. The values are converted to the type under test.
#[derive(Clone, Debug)]
pub(crate) struct Input {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Input {
    /// Returns values between -2 and 2 that do not repeat. A different `phase` gives different values.
    pub(crate) fn wave(shape: impl Into<Vec<usize>>, phase: f64) -> Self {
        let shape = shape.into();
        let count: usize = shape.iter().product();
        let value = |i| 2.0 * ((i as f64 + 1.0) * 0.7548776662 * (1.0 + phase) + phase).sin();
        Self {
            values: (0..count).map(value).collect(),
            shape,
        }
    }

    /// Returns the same values times `factor`, plus `offset`.
    pub(crate) fn scaled(mut self, factor: f64, offset: f64) -> Self {
        self.values
            .iter_mut()
            .for_each(|x| *x = *x * factor + offset);
        self
    }

    fn rounded(&self, dtype: DType) -> Vec<f64> {
        self.values.iter().map(|x| round(*x, dtype)).collect()
    }
}

fn round(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => x,
        DType::F32 => f64::from(x as f32),
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::BF16 => bf16::from_f64(x).to_f64(),
        other => panic!("{other:?} is not tested"),
    }
}

/// Returns the devices of this build, and the float types that each device supports. Prints the types that are skipped.
pub(crate) fn devices() -> Vec<(Device, Vec<DType>)> {
    let types = vec![DType::F64, DType::F32, DType::F16, DType::BF16];
    #[allow(unused_mut)]
    let mut devices = vec![(Device::flex(), types)];
    #[cfg(feature = "wgpu")]
    devices.push(cube(Device::wgpu(Default::default()), "wgpu"));
    #[cfg(feature = "cuda")]
    devices.push(cube(Device::cuda(0), "cuda"));
    devices
}

#[cfg(feature = "cubecl")]
fn cube(device: Device, name: &str) -> (Device, Vec<DType>) {
    let all = [DType::F32, DType::F16, DType::BF16];
    let (has, lacks): (Vec<_>, Vec<_>) = all
        .into_iter()
        .partition(|dtype| device.supports_dtype(*dtype));
    if !lacks.is_empty() {
        println!("{name} has no {lacks:?}: left out");
    }
    (device, has)
}

/// The output of an operation, and the gradient of each of its inputs.
#[derive(Clone, Debug)]
pub(crate) struct Evaluation {
    pub output: Vec<f64>,
    pub gradients: Vec<Vec<f64>>,
}

/// Computes the output of `operation` and the gradients of its inputs. The gradient of the output consists of the
/// values of [`Input::wave`]. The inputs are flat, and the operation reshapes them to [`Input::shape`].
pub(crate) fn evaluate(
    inputs: &[Input],
    device: &Device,
    dtype: DType,
    rounded_to: DType,
    operation: &impl Fn(&[Tensor<1>]) -> Tensor<1>,
) -> Evaluation {
    let device = device.clone().autodiff();
    let leaf = |input: &Input| {
        let values = input.rounded(rounded_to);
        let shape = [values.len()];
        let data = TensorData::new(values, shape).convert_dtype(dtype);
        Tensor::<1>::from_data(data, (&device, dtype)).require_grad()
    };
    let leaves: Vec<_> = inputs.iter().map(leaf).collect();
    let output = operation(&leaves);
    let seed = Input::wave([output.dims()[0]], 0.37).rounded(rounded_to);
    let count = seed.len();
    let data = TensorData::new(seed, [count]).convert_dtype(output.dtype());
    let seed = Tensor::<1>::from_data(data, (&device, output.dtype()));
    // The sum of a 16-bit loss is rounded, but the rounding does not affect its gradient.
    let gradients = (output.clone() * seed).sum().backward();
    let gradient = |leaf: &Tensor<1>| match leaf.grad(&gradients) {
        Some(gradient) => doubles(gradient),
        None => vec![0.0; leaf.dims()[0]],
    };
    Evaluation {
        output: doubles(output),
        gradients: leaves.iter().map(gradient).collect(),
    }
}

fn doubles(tensor: Tensor<1>) -> Vec<f64> {
    let data = tensor.into_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("converted to f64")
}

/// Returns the tolerance relative to the largest compared value. It is a few units in the last place of the type.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 5e-6,
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        other => panic!("{other:?} is not tested"),
    }
}

/// Compares `ours` with `reference` on every device, in every type, and with both kinds of reduction.
pub(crate) fn compare(
    name: &str,
    inputs: &[Input],
    ours: impl Fn(&[Tensor<1>]) -> Tensor<1>,
    reference: impl Fn(&[Tensor<1>]) -> Tensor<1>,
) {
    compare_within(1.0, name, inputs, ours, reference);
}

/// Does the same as [`compare`], with tolerances that are multiplied by `factor`.
pub(crate) fn compare_within(
    factor: f64,
    name: &str,
    inputs: &[Input],
    ours: impl Fn(&[Tensor<1>]) -> Tensor<1>,
    reference: impl Fn(&[Tensor<1>]) -> Tensor<1>,
) {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            let expected = evaluate(inputs, &Device::flex(), DType::F64, dtype, &reference);
            let check = |form: &str| {
                let actual = evaluate(inputs, &device, dtype, dtype, &ours);
                let what = format!("{name} in {dtype:?} on {device:?}{form}");
                assert_close(&what, &expected, &actual, factor * tolerance(dtype));
            };
            if device == Device::flex() {
                check("");
                continue;
            }
            #[cfg(feature = "cubecl")]
            for reduction in [
                crate::cube::Reduction::Planes,
                crate::cube::Reduction::Shared,
            ] {
                crate::cube::with_reduction(reduction, || check(&format!(" by {reduction:?}")));
            }
        }
    }
}

/// Asserts that outputs and gradients are equal up to a tolerance, each relative to its largest value.
pub(crate) fn assert_close(what: &str, expected: &Evaluation, actual: &Evaluation, tolerance: f64) {
    assert_values(
        &format!("{what}: output"),
        &expected.output,
        &actual.output,
        tolerance,
    );
    let pairs = expected.gradients.iter().zip(&actual.gradients);
    for (i, (expected, actual)) in pairs.enumerate() {
        assert_values(
            &format!("{what}: gradient {i}"),
            expected,
            actual,
            tolerance,
        );
    }
}

fn assert_values(what: &str, expected: &[f64], actual: &[f64], tolerance: f64) {
    assert_eq!(expected.len(), actual.len(), "{what}: lengths");
    let finite = expected.iter().filter(|x| x.is_finite());
    let largest = finite.fold(0.0f64, |most, x| most.max(x.abs())).max(1e-30);
    for (i, (expected, actual)) in expected.iter().zip(actual).enumerate() {
        let same = if expected.is_finite() {
            (expected - actual).abs() <= tolerance * largest
        } else {
            expected == actual || expected.is_nan() && actual.is_nan()
        };
        assert!(
            same,
            "{what}: element {i} is {actual} and should be {expected} (largest {largest:e}, \
             tolerance {tolerance:e} of it)"
        );
    }
}

/// Returns the gradients of an operation by central differences in f64 on the CPU.
pub(crate) fn numeric_gradients(
    inputs: &[Input],
    operation: &impl Fn(&[Tensor<1>]) -> Tensor<1>,
) -> Vec<Vec<f64>> {
    let device = Device::flex();
    let value = |inputs: &[Input]| {
        let leaf = |input: &Input| {
            let shape = [input.values.len()];
            let data = TensorData::new(input.values.clone(), shape);
            Tensor::<1>::from_data(data, (&device, DType::F64))
        };
        let output = doubles(operation(&inputs.iter().map(leaf).collect::<Vec<_>>()));
        let seed = Input::wave([output.len()], 0.37).values;
        output.iter().zip(seed).map(|(y, s)| y * s).sum::<f64>()
    };
    const STEP: f64 = 1e-5;
    let mut moved = inputs.to_vec();
    let mut gradients = Vec::new();
    for i in 0..inputs.len() {
        let mut gradient = Vec::new();
        for j in 0..inputs[i].values.len() {
            let at = inputs[i].values[j];
            moved[i].values[j] = at + STEP;
            let above = value(&moved);
            moved[i].values[j] = at - STEP;
            gradient.push((above - value(&moved)) / (2.0 * STEP));
            moved[i].values[j] = at;
        }
        gradients.push(gradient);
    }
    gradients
}

/// Asserts that the gradients that autodiff computes for an operation agree with central differences.
pub(crate) fn assert_gradients(
    name: &str,
    inputs: &[Input],
    operation: impl Fn(&[Tensor<1>]) -> Tensor<1>,
) {
    let recorded = evaluate(inputs, &Device::flex(), DType::F64, DType::F64, &operation);
    let numeric = numeric_gradients(inputs, &operation);
    for (i, (numeric, recorded)) in numeric.iter().zip(&recorded.gradients).enumerate() {
        assert_values(
            &format!("{name}: gradient {i} by differences"),
            numeric,
            recorded,
            1e-8,
        );
    }
}
