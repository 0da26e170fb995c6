//! In what two sources differ.

use burn::tensor::TensorData;

use super::{CheckpointError, ElementType, Slice, TensorMeta, TensorSource};

/// Elements that are compared at once.
const WINDOW: usize = 1 << 20;

/// In what two sources differ.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Tensors that only the first has.
    pub only_first: Vec<String>,
    /// Tensors that only the second has.
    pub only_second: Vec<String>,
    /// Tensors that both have and that are not the same.
    pub different: Vec<TensorDifference>,
    /// How many tensors are the same: type, shape and every bit.
    pub same: usize,
}

/// In what two tensors differ.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDifference {
    /// The tensor in the first source.
    pub first: TensorMeta,
    /// The tensor in the second.
    pub second: TensorMeta,
    /// How many elements differ: in their bits, or in their values if the types differ. `None` if the
    /// shapes differ.
    pub elements: Option<u64>,
    /// The largest difference of two elements. A difference that is no number counts as infinite.
    pub max_absolute: f64,
    /// The largest difference of two elements, over the larger of their sizes.
    pub max_relative: f64,
}

impl Comparison {
    /// Whether both sources have the same tensors.
    pub fn is_same(&self) -> bool {
        self.only_first.is_empty() && self.only_second.is_empty() && self.different.is_empty()
    }
}

/// Compares all tensors of two sources, with a few megabytes of each in memory. `progress` gets the bytes
/// of the first that were compared since its last call.
///
/// # Errors
///
/// [`CheckpointError`] for what cannot be read.
pub fn compare(
    first: &dyn TensorSource,
    second: &dyn TensorSource,
    progress: &mut dyn FnMut(u64),
) -> Result<Comparison, CheckpointError> {
    let mut result = Comparison::default();
    for key in first.keys() {
        let (Some(a), b) = (first.tensor(&key), second.tensor(&key)) else {
            continue;
        };
        let Some(b) = b else {
            result.only_first.push(key);
            continue;
        };
        let mut difference = TensorDifference::new(a, b);
        if difference.first.shape == difference.second.shape {
            let meta = &difference.first;
            let shape = meta.shape.clone();
            let (len, size) = (Slice::whole(&shape).len(), meta.dtype.size());
            for start in (0..len).step_by(WINDOW) {
                let stretch = start..len.min(start + WINDOW);
                let bytes = stretch.len() * size;
                for part in Slice::of_stretch(&shape, stretch) {
                    let (a, b) = (first.read(&key, &part)?, second.read(&key, &part)?);
                    difference.add(&a, &b);
                }
                progress(bytes as u64);
            }
        }
        match difference.is_none() {
            true => result.same += 1,
            false => result.different.push(difference),
        }
    }
    let only = second.keys().into_iter();
    let only = only.filter(|key| first.tensor(key).is_none());
    result.only_second = only.collect();
    Ok(result)
}

impl TensorDifference {
    fn new(first: TensorMeta, second: TensorMeta) -> Self {
        let elements = (first.shape == second.shape).then_some(0);
        Self {
            first,
            second,
            elements,
            max_absolute: 0.0,
            max_relative: 0.0,
        }
    }

    fn is_none(&self) -> bool {
        self.elements == Some(0) && self.first.dtype == self.second.dtype
    }

    /// Compares the bytes of a box.
    fn add(&mut self, first: &[u8], second: &[u8]) {
        let (a, b) = (self.first.dtype, self.second.dtype);
        if a == b && first == second {
            return;
        }
        let bits = |dtype: ElementType, bytes: &[u8], index: usize| {
            let size = dtype.size();
            bytes[index * size..(index + 1) * size].to_vec()
        };
        let (x, y) = (values(a, first), values(b, second));
        for (index, (x, y)) in x.into_iter().zip(y).enumerate() {
            let same = match a == b {
                true => bits(a, first, index) == bits(b, second, index),
                false => x == y || x.is_nan() && y.is_nan(),
            };
            if same {
                continue;
            }
            self.elements = self.elements.map(|elements| elements + 1);
            let number = |x: f64| if x.is_nan() { f64::INFINITY } else { x };
            // Zeros of both signs, or two kinds of NaN, differ in their bits alone.
            let none = x == y || x.is_nan() && y.is_nan();
            let absolute = if none { 0.0 } else { number((x - y).abs()) };
            let relative = if none {
                0.0
            } else {
                number(absolute / x.abs().max(y.abs()))
            };
            self.max_absolute = self.max_absolute.max(absolute);
            self.max_relative = self.max_relative.max(relative);
        }
    }
}

/// The elements as f64; of 64-bit integers the nearest.
fn values(dtype: ElementType, bytes: &[u8]) -> Vec<f64> {
    let len = bytes.len() / dtype.size();
    let data = TensorData::from_bytes_vec(bytes.to_vec(), [len], dtype.dtype());
    data.iter::<f64>().collect()
}
