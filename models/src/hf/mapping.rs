//! Maps tensors of Hugging Face files to parts of parameters.

use burn_megatron::checkpoint::{MODEL, TensorSlice};

/// The encoding of the values of a tensor in a Hugging Face file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightEncoding {
    /// Floating-point values. A file may also contain a matrix in FP8 (E4M3), as in DeepSeek-V3, with an f32 scale per
    /// block of 128 x 128 in a tensor `NAME_scale_inv`. FP8 values are multiplied by their scale in f32 and rounded to
    /// bf16.
    Floats,
    /// MXFP4, as in gpt-oss, in the byte tensors `NAME_blocks` `[.., columns / 32, 16]` and `NAME_scales` `[.., columns
    /// / 32]`. Each byte of a block contains two E2M1 values, and the low bits contain the first value. Scales are
    /// E8M0. The conversion to bf16 is exact. MXFP4 can be read but not written.
    Mxfp4,
}

/// A mapping from a tensor of a Hugging Face file to a parameter or to a part of a parameter.
///
/// Several tensors with the same key are concatenated along the last dimension of the parameter, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightMapping {
    /// The name of the tensor in the file.
    pub name: String,
    /// The shape of the tensor in the file, with at least one dimension and no dimension of size 0. For MXFP4, this is
    /// the shape of the decoded values.
    pub shape: Vec<usize>,
    /// The key of the parameter in a checkpoint: the prefix [`MODEL`], followed by the path of the parameter.
    pub key: String,
    /// The offset of the tensor along the last dimension of the parameter.
    pub offset: usize,
    /// Whether the last two dimensions are swapped in the file.
    pub transposed: bool,
    /// Whether the file interleaves the two halves of the last dimension of the parameter. The first half is then at
    /// the even indices of the tensor, and the second half at the odd indices.
    pub interleaved: bool,
    /// The index of the expert if the tensor contains a single expert. This is an index along the first dimension of
    /// the parameter. The tensor in the file does not have this dimension.
    pub expert: Option<usize>,
    /// The encoding of the values.
    pub encoding: WeightEncoding,
    /// Whether the tensor keeps its dtype if the other weights are exported in another dtype.
    pub keeps_type: bool,
}

impl WeightMapping {
    /// Maps the tensor `name` to the whole parameter at `path`, which has the same shape.
    pub fn whole(path: &str, name: &str, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            key: format!("{MODEL}{path}"),
            offset: 0,
            transposed: false,
            interleaved: false,
            expert: None,
            encoding: WeightEncoding::Floats,
            keeps_type: false,
        }
    }

    /// Maps one or more PyTorch linear layers to the linear layer at `path`, in which they are concatenated. `parts`
    /// lists the names and output sizes of the PyTorch layers. Each layer has a `weight` `[output, input]`, and a
    /// `bias` if `bias` is set.
    pub fn linear(path: &str, input: usize, parts: &[(String, usize)], bias: bool) -> Vec<Self> {
        let mut list = vec![];
        let mut add = |what: &str, shape: &dyn Fn(usize) -> Vec<usize>| {
            let mut offset = 0;
            for (name, output) in parts {
                let (path, name) = (format!("{path}.{what}"), format!("{name}.{what}"));
                list.push(Self {
                    offset,
                    transposed: what == "weight",
                    ..Self::whole(&path, &name, &shape(*output))
                });
                offset += output;
            }
        };
        add("weight", &|output| vec![output, input]);
        if bias {
            add("bias", &|output| vec![output]);
        }
        list
    }

    /// Returns the slice of the parameter that the tensor fills.
    pub(super) fn own(&self) -> TensorSlice {
        let mut shape = self.shape.clone();
        if self.transposed {
            swap_last_two(&mut shape);
        }
        let mut own = TensorSlice::whole(&shape);
        own.offset[shape.len() - 1] = self.offset;
        if let Some(expert) = self.expert {
            own.offset.insert(0, expert);
            own.shape.insert(0, 1);
        }
        own
    }

    /// Returns the two halves of the slice that the file interleaves, or `None` if it does not.
    pub(super) fn halves(&self) -> Option<[TensorSlice; 2]> {
        let own = self.own();
        let last = own.shape.len() - 1;
        let width = own.shape[last] / 2;
        let half = |number| {
            let mut half = own.clone();
            half.offset[last] += number * width;
            half.shape[last] = width;
            half
        };
        self.interleaved.then(|| [half(0), half(1)])
    }

    /// Enlarges the shape of the parameter so that it contains this tensor.
    pub(super) fn extend(&self, shape: &mut Vec<usize>) {
        let own = self.own();
        shape.resize(own.shape.len(), 0);
        for (dim, size) in shape.iter_mut().enumerate() {
            *size = (*size).max(own.offset[dim] + own.shape[dim]);
        }
    }

    /// Returns the slices of the parameter in which the tensor is copied. Each slice consists of rows of the file, with
    /// elements of `size` bytes. It has at most `most` bytes, unless a single row is larger.
    pub(super) fn slices(&self, size: usize, most: usize) -> Vec<TensorSlice> {
        let whole = self.own();
        let last = whole.shape.len() - 1;
        let first = usize::from(self.expert.is_some());
        let is_turned = self.transposed && self.shape.len() == 2;
        let dim = if is_turned { last } else { first };
        let rows = self.shape[0];
        let row = self.shape[1..].iter().product::<usize>() * size;
        let step = if is_turned && self.interleaved {
            // Rows that are adjacent in the file are not adjacent in the parameter.
            rows
        } else {
            (most / row).max(1)
        };
        let rows_from = |first: usize| {
            let mut slice = whole.clone();
            slice.offset[dim] += first;
            slice.shape[dim] = step.min(rows - first);
            slice
        };
        (0..rows).step_by(step).map(rows_from).collect()
    }
}

/// Swaps the entries of the last two dimensions.
pub(super) fn swap_last_two(dims: &mut [usize]) {
    let last = dims.len() - 1;
    dims.swap(last - 1, last);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::CHUNK;

    #[test]
    fn boxes_are_rows_of_the_file() {
        let mapped = |transposed| WeightMapping {
            offset: 4,
            transposed,
            ..WeightMapping::whole("weight", "weight", &[5, 3])
        };
        let slice = |offset: [usize; 2], shape: [usize; 2]| TensorSlice {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        };
        // With a limit of 30 bytes, a slice has two rows of three 4-byte elements. If a single row exceeds the limit, a
        // slice has one row.
        let turned = [([0, 4], [3, 2]), ([0, 6], [3, 2]), ([0, 8], [3, 1])];
        assert_eq!(
            mapped(true).slices(4, 30),
            turned.map(|(at, shape)| slice(at, shape))
        );
        let plain = [([0, 4], [2, 3]), ([2, 4], [2, 3]), ([4, 4], [1, 3])];
        assert_eq!(
            mapped(false).slices(4, 30),
            plain.map(|(at, shape)| slice(at, shape))
        );
        assert_eq!(mapped(true).slices(4, 1).len(), 5);
        assert_eq!(mapped(true).slices(4, CHUNK), [slice([0, 4], [3, 5])]);
    }

    #[test]
    fn a_tensor_of_an_expert_is_one_row_of_the_first_dim() {
        let mapped = |transposed| WeightMapping {
            offset: 4,
            transposed,
            expert: Some(2),
            ..WeightMapping::whole("experts", "expert", &[5, 3])
        };
        let slice = |offset: [usize; 3], shape: [usize; 3]| TensorSlice {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        };
        let turned = [slice([2, 0, 4], [1, 3, 4]), slice([2, 0, 8], [1, 3, 1])];
        assert_eq!(mapped(true).slices(4, 50), turned);
        let plain = [slice([2, 0, 4], [1, 4, 3]), slice([2, 4, 4], [1, 1, 3])];
        assert_eq!(mapped(false).slices(4, 50), plain);
        let mut shape = vec![];
        mapped(true).extend(&mut shape);
        assert_eq!(shape, [3, 3, 9]);
    }
    /// A tensor with a matrix per expert is copied one expert at a time. An expert is not divided if halves alternate
    /// along its rows.
    #[test]
    fn a_tensor_of_all_experts_is_copied_by_expert() {
        let mapped = |shape: &[usize], transposed| WeightMapping {
            transposed,
            interleaved: true,
            ..WeightMapping::whole("experts", "experts", shape)
        };
        let slices = mapped(&[3, 4, 5], true).slices(4, 100);
        let slice = |expert| TensorSlice {
            offset: vec![expert, 0, 0],
            shape: vec![1, 5, 4],
        };
        assert_eq!(slices, [0, 1, 2].map(slice));
        assert_eq!(mapped(&[3, 4, 5], false).slices(4, 160)[0].shape, [2, 4, 5]);
        assert_eq!(
            mapped(&[4, 5], true).slices(4, 1),
            [TensorSlice::whole(&[5, 4])]
        );
    }
}
