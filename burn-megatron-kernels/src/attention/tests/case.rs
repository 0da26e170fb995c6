//! Attention problems that are tested with every engine on every device.

use super::*;

/// The factor of the tolerance for gradients.
///
/// Gradients are sums of terms that nearly cancel, but the tolerance is relative to the sum. On tensor cores, the
/// weights of the sum are also rounded to 16 bits.
pub const CANCELLED: f64 = 6.0;

/// An engine on a device, with the element types that the engine supports on this device.
pub struct Tested {
    pub device: Device,
    pub engine: Arc<dyn AttentionEngine>,
    pub types: Vec<DType>,
}

/// Returns the portable engine on every device.
pub fn portable() -> impl Iterator<Item = Tested> {
    devices().into_iter().map(|(device, types)| Tested {
        device,
        engine: Arc::new(Portable),
        types,
    })
}

/// Returns the engines that use tensor cores. Prints the devices that have no such engine.
pub fn matrix_engines() -> Vec<Tested> {
    #[allow(unused_mut)]
    let mut engines = Vec::new();
    #[cfg(feature = "cubecl")]
    for (device, _) in devices() {
        match MmaTiles::new(&device) {
            Ok(engine) => engines.push(Tested {
                device,
                types: engine.types().to_vec(),
                engine: Arc::new(engine),
            }),
            Err(error) => println!("left out: {error}"),
        }
    }
    engines
}

/// Compares every engine that supports these widths with `reference`, on every device and in every type.
pub fn compare_engines(
    name: &str,
    widths: (usize, usize),
    inputs: &[Input],
    ours: impl Fn(&[Tensor<1>], Arc<dyn AttentionEngine>) -> Tensor<1>,
    reference: impl Fn(&[Tensor<1>]) -> Tensor<1>,
) {
    let by_portable = |x: &[_]| ours(x, Arc::new(Portable));
    compare_within(CANCELLED, name, inputs, by_portable, &reference);
    compare_matrix_engines(name, widths, inputs, ours, reference);
}

pub fn compare_matrix_engines(
    name: &str,
    (width, values): (usize, usize),
    inputs: &[Input],
    ours: impl Fn(&[Tensor<1>], Arc<dyn AttentionEngine>) -> Tensor<1>,
    reference: impl Fn(&[Tensor<1>]) -> Tensor<1>,
) {
    for Tested {
        device,
        engine,
        types,
    } in matrix_engines()
    {
        for dtype in types {
            let x = |width| Tensor::<4>::zeros([1, 1, 1, width], (&device, dtype));
            let (q, v, options) = (x(width), x(values), AttentionOptions::default());
            let problem = AttentionProblem::separate([&q, &q, &v], None, &options).unwrap();
            if engine.supports(&problem).is_err() {
                continue;
            }
            let expected = evaluate(inputs, &Device::flex(), DType::F64, dtype, &reference);
            let ours = |x: &[_]| ours(x, engine.clone());
            let actual = evaluate(inputs, &device, dtype, dtype, &ours);
            let what = format!("{name} by {} in {dtype:?} on {device:?}", engine.name());
            assert_close(&what, &expected, &actual, CANCELLED * tolerance(dtype));
        }
    }
}

/// An attention problem to test.
#[derive(Clone, Debug)]
pub struct Case {
    pub batch: usize,
    pub queries: usize,
    pub keys: usize,
    pub heads: Heads,
    pub value_width: usize,
    pub scale: Option<f64>,
    pub causal: bool,
    pub window: Option<(usize, usize)>,
    pub ends: Option<Vec<usize>>,
    pub ranges: Option<Vec<Range<usize>>>,
    pub sink: bool,
}

pub const fn heads(heads: usize, groups: usize, width: usize) -> Heads {
    Heads {
        heads,
        groups,
        width,
    }
}

impl Case {
    pub fn new(batch: usize, queries: usize, keys: usize, heads: Heads) -> Self {
        Self {
            batch,
            queries,
            keys,
            heads,
            value_width: heads.width,
            scale: None,
            causal: true,
            window: None,
            ends: None,
            ranges: None,
            sink: false,
        }
    }

    pub fn options(&self, device: &Device) -> AttentionOptions {
        let ends = self.ends.as_ref();
        let documents = ends.map(|ends| KeyRanges::of_documents(ends, device).unwrap());
        let ranges = self.ranges.clone();
        let ranges = ranges.map(|ranges| KeyRanges::new(ranges, self.keys, device).unwrap());
        AttentionOptions {
            soft_cap: None,
            scale: self.scale,
            causal: self.causal,
            window: self.window.map(|(left, right)| Window { left, right }),
            ranges: documents.or(ranges),
        }
    }

    /// Returns the shapes of queries, keys and values.
    pub fn shapes(&self) -> [[usize; 4]; 3] {
        let Heads {
            heads,
            groups,
            width,
        } = self.heads;
        [
            [self.batch, self.queries, heads, width],
            [self.batch, self.keys, groups, width],
            [self.batch, self.keys, groups, self.value_width],
        ]
    }

    pub fn inputs(&self) -> Vec<Input> {
        let [q, k, v] = self.shapes();
        let mut inputs = vec![
            Input::wave(q, 0.1).scaled(0.5, 0.0),
            Input::wave(k, 0.57).scaled(0.5, 0.0),
            Input::wave(v, 0.91),
        ];
        if self.sink {
            inputs.push(Input::wave([self.heads.heads], 0.4));
        }
        inputs
    }

    /// Splits the flat inputs of a test into queries, keys, values and the sink.
    pub fn split(&self, x: &[Tensor<1>]) -> ([Tensor<4>; 3], Option<Tensor<1>>) {
        let shapes = self.shapes();
        let tensors = [0, 1, 2].map(|i| x[i].clone().reshape(shapes[i]));
        (tensors, x.get(3).cloned())
    }

    pub fn by(&self, engine: Arc<dyn AttentionEngine>, x: &[Tensor<1>]) -> Tensor<1> {
        let ([q, k, v], sink) = self.split(x);
        let options = self.options(&q.device());
        flash_attention_with(engine, q, k, v, sink, &options).flatten(0, 3)
    }

    pub fn ours(&self, x: &[Tensor<1>]) -> Tensor<1> {
        self.by(Arc::new(Portable), x)
    }

    pub fn reference(&self, x: &[Tensor<1>]) -> Tensor<1> {
        let ([q, k, v], sink) = self.split(x);
        let options = self.options(&q.device());
        composed::flash_attention(q, k, v, sink, &options).flatten(0, 3)
    }

    /// Compares every engine that supports this problem with the reference.
    pub fn compare(&self) {
        let widths = (self.heads.width, self.value_width);
        let ours = |x: &[_], engine| self.by(engine, x);
        let reference = |x: &[_]| self.reference(x);
        compare_engines(
            &format!("{self:?}"),
            widths,
            &self.inputs(),
            ours,
            reference,
        );
    }

    /// Compares in the widest type of each device. Errors are relative to the largest of all values, because the sums
    /// of a random problem may cancel to zero.
    pub fn agree(&self, devices: impl IntoIterator<Item = (Device, Vec<DType>)>) {
        let inputs = self.inputs();
        let (exact, plain) = (DType::F64, Device::flex());
        let expected = evaluate(&inputs, &plain, exact, DType::F32, &|x| self.reference(x));
        for (device, dtypes) in devices {
            let bound = if dtypes[0] == exact { 1e-13 } else { 5e-6 };
            let actual = evaluate(&inputs, &device, dtypes[0], DType::F32, &|x| self.ours(x));
            let largest = expected
                .gradients
                .iter()
                .chain([&expected.output])
                .flatten();
            let bound = bound * largest.fold(1.0f64, |most, x| most.max(x.abs()));
            let name = format!("{self:?} on {device:?}");
            assert_near(&name, actual.output, expected.output.clone(), bound);
            let pairs = actual.gradients.into_iter().zip(&expected.gradients);
            pairs
                .for_each(|(actual, expected)| assert_near(&name, actual, expected.clone(), bound));
        }
    }
}

/// Returns an input as a tensor without autodiff.
pub fn plain<const D: usize>(input: &Input, device: &Device, dtype: DType) -> Tensor<D> {
    let data = TensorData::new(input.values.clone(), input.shape.clone()).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

pub fn doubles<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    let data = tensor.into_data().convert_dtype(DType::F64);
    data.try_into_vec::<f64>().unwrap()
}

pub fn assert_near(what: &str, a: Vec<f64>, b: Vec<f64>, tolerance: f64) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (a, b)) in a.iter().zip(&b).enumerate() {
        assert!(
            (a - b).abs() <= tolerance * (1.0 + b.abs()),
            "{what} {i}: {a} and {b}"
        );
    }
}
