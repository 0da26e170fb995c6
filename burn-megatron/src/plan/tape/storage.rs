//! Which tensors of a recording share memory.

use std::collections::HashMap;

use burn::tensor::DType;
use burn_ir::{BaseOperationIr, CustomOpIr, OperationIr, TensorId, TensorIr};

/// A piece of memory, by its number.
pub(super) type Storage = usize;

/// The storages of the tensors seen so far.
#[derive(Debug, Default)]
pub(super) struct Storages {
    of: HashMap<TensorId, View>,
    bytes: Vec<u64>,
}

#[derive(Clone, Debug)]
struct View {
    storage: Storage,
    /// In elements.
    strides: Vec<usize>,
}

/// The bytes of a tensor by itself.
pub(super) fn bytes_of(tensor: &TensorIr) -> u64 {
    let size = match tensor.dtype {
        DType::Bool(_) => 1,
        dtype => dtype.size(),
    };
    (tensor.shape.num_elements() * size) as u64
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

/// Whether elements of these strides follow each other.
fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let expected = row_major(shape);
    let dims = shape.iter().zip(strides).zip(expected);
    dims.into_iter()
        .all(|((len, stride), expected)| *len == 1 || *stride == expected)
}

impl Storages {
    /// The storage of a tensor; its own where it was not seen before.
    pub fn of(&mut self, tensor: &TensorIr) -> Storage {
        match self.of.get(&tensor.id) {
            Some(view) => view.storage,
            None => self.make(tensor),
        }
    }

    /// The number of storages.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes of a storage.
    pub fn bytes(&self, storage: Storage) -> u64 {
        self.bytes[storage]
    }

    /// Gives a tensor the storage of another one.
    pub fn alias(&mut self, tensor: &TensorIr, storage: Storage) {
        let strides = row_major(&tensor.shape.to_vec());
        self.of.insert(tensor.id, View { storage, strides });
    }

    /// A new storage of so many bytes.
    pub fn make_unnamed(&mut self, bytes: u64) -> Storage {
        self.bytes.push(bytes);
        self.bytes.len() - 1
    }

    /// A new storage for a tensor.
    pub fn make(&mut self, tensor: &TensorIr) -> Storage {
        let storage = self.make_unnamed(bytes_of(tensor));
        self.alias(tensor, storage);
        storage
    }

    /// Enters the outputs of an operation; returns the storages that it makes. `is_buffer` tells which storages are
    /// flat buffers of gradients, which kernels write in place.
    pub fn enter(
        &mut self,
        operation: &OperationIr,
        is_buffer: impl Fn(Storage) -> bool,
    ) -> Vec<Storage> {
        for input in operation.inputs() {
            self.of(input);
        }
        if let Some((input, out, strides)) = self.view(operation) {
            let storage = self.of(input);
            self.of.insert(out.id, View { storage, strides });
            return vec![];
        }
        let mut made = vec![];
        for out in operation.outputs() {
            match self
                .written_in_place(operation, out)
                .filter(|it| is_buffer(*it))
            {
                Some(storage) => self.alias(out, storage),
                None => made.push(self.make(out)),
            }
        }
        made
    }

    /// The input that a kernel may write its output to.
    fn written_in_place(&self, operation: &OperationIr, out: &TensorIr) -> Option<Storage> {
        let OperationIr::Custom(CustomOpIr { inputs, .. }) = operation else {
            return None;
        };
        let same = |input: &&TensorIr| (&input.shape, input.dtype) == (&out.shape, out.dtype);
        inputs
            .iter()
            .filter(same)
            .find_map(|input| Some(self.of.get(&input.id)?.storage))
    }

    /// The input, the output and its strides, if it is a view of the input.
    fn view<'a>(
        &self,
        operation: &'a OperationIr,
    ) -> Option<(&'a TensorIr, &'a TensorIr, Vec<usize>)> {
        let (OperationIr::BaseFloat(base)
        | OperationIr::BaseInt(base)
        | OperationIr::BaseBool(base)) = operation
        else {
            return None;
        };
        let strides = |tensor: &TensorIr| self.of[&tensor.id].strides.clone();
        Some(match base {
            BaseOperationIr::Reshape(op) => {
                let from = strides(&op.input);
                if !is_contiguous(&op.input.shape.to_vec(), &from) {
                    return None;
                }
                (&op.input, &op.out, row_major(&op.out.shape.to_vec()))
            }
            BaseOperationIr::SwapDims(op) => {
                let mut strides = strides(&op.input);
                strides.swap(op.dim1, op.dim2);
                (&op.input, &op.out, strides)
            }
            BaseOperationIr::Permute(op) => {
                let from = strides(&op.input);
                let strides = op.axes.iter().map(|axis| from[*axis]).collect();
                (&op.input, &op.out, strides)
            }
            BaseOperationIr::Expand(op) => {
                let (shape, from) = (op.input.shape.to_vec(), strides(&op.input));
                let more = op.out.shape.num_dims() - shape.len();
                let own = shape.iter().zip(&from);
                let own = own.map(|(len, stride)| if *len == 1 { 0 } else { *stride });
                let strides = std::iter::repeat_n(0, more).chain(own).collect();
                (&op.input, &op.out, strides)
            }
            BaseOperationIr::Slice(op) => {
                let from = strides(&op.tensor);
                let steps = op.ranges.iter().map(|range| range.step.unsigned_abs());
                let steps = steps.chain(std::iter::repeat(1));
                let strides = from.iter().zip(steps).map(|(stride, step)| stride * step);
                (&op.tensor, &op.out, strides.collect())
            }
            _ => return None,
        })
    }
}
