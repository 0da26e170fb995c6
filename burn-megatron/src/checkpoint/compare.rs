//! Compares the tensors of two checkpoints or other tensor sources.

use burn::tensor::TensorData;

use super::{CheckpointError, ElementType, TensorMeta, TensorSlice, TensorSource};

/// The number of elements that are read at once.
const READ_ELEMENTS: usize = 1 << 20;

/// The differences between the tensors of two sources.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CheckpointComparison {
    /// The keys of the tensors that only the first source has.
    pub only_first: Vec<String>,
    /// The keys of the tensors that only the second source has.
    pub only_second: Vec<String>,
    /// The tensors that both sources have, but with different types, shapes or elements.
    pub different: Vec<TensorDifference>,
    /// The number of tensors whose type, shape and bits are equal in both sources.
    pub same: usize,
}

/// The difference between two tensors with the same key.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDifference {
    /// The key, type and shape of the tensor in the first source.
    pub first: TensorMeta,
    /// The key, type and shape of the tensor in the second source.
    pub second: TensorMeta,
    /// The number of elements that differ, or `None` if the shapes differ. Elements are compared by their bits, or by
    /// their values if the types differ.
    pub elements: Option<u64>,
    /// The largest absolute difference of an element. NaN counts as an infinite difference.
    pub max_absolute: f64,
    /// The largest relative difference of an element: the absolute difference divided by the larger of the two
    /// magnitudes.
    pub max_relative: f64,
}

impl CheckpointComparison {
    /// Whether both sources have the same tensors with the same elements.
    pub fn is_same(&self) -> bool {
        self.only_first.is_empty() && self.only_second.is_empty() && self.different.is_empty()
    }
}

/// Compares all tensors of two sources. Only a few megabytes of each source are in memory at the same time. `progress`
/// is called with the number of bytes of the first source that were compared since the previous call.
///
/// # Errors
///
/// [`CheckpointError`] if reading fails.
pub fn compare(
    first: &dyn TensorSource,
    second: &dyn TensorSource,
    progress: &mut dyn FnMut(u64),
) -> Result<CheckpointComparison, CheckpointError> {
    let mut result = CheckpointComparison::default();
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
            let (len, size) = (TensorSlice::whole(&shape).len(), meta.dtype.size());
            for start in (0..len).step_by(READ_ELEMENTS) {
                let range = start..len.min(start + READ_ELEMENTS);
                let bytes = range.len() * size;
                for part in TensorSlice::from_flat_range(&shape, range) {
                    let (a, b) = (first.read(&key, &part)?, second.read(&key, &part)?);
                    difference.add(&a, &b);
                }
                progress(bytes as u64);
            }
        }
        if difference.is_none() {
            result.same += 1
        } else {
            result.different.push(difference)
        }
    }
    let only = second
        .keys()
        .into_iter()
        .filter(|key| first.tensor(key).is_none());
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

    /// Compares the bytes of one slice.
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
            let same = if a == b {
                bits(a, first, index) == bits(b, second, index)
            } else {
                x == y || x.is_nan() && y.is_nan()
            };
            if same {
                continue;
            }
            self.elements = self.elements.map(|elements| elements + 1);
            let number = |x: f64| if x.is_nan() { f64::INFINITY } else { x };
            // Zeros of both signs, or two NaNs, may differ only in their bits.
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

/// Returns the elements as f64. 64-bit integers are rounded.
fn values(dtype: ElementType, bytes: &[u8]) -> Vec<f64> {
    let len = bytes.len() / dtype.size();
    let data = TensorData::from_bytes_vec(bytes.to_vec(), [len], dtype.dtype());
    data.iter::<f64>().collect()
}
