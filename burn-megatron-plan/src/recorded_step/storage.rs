//! Determines which tensors of a recording share memory.

use std::collections::HashMap;

use burn::tensor::DType;
use burn_ir::{BaseOperationIr, CustomOpIr, OperationIr, TensorId, TensorIr, TensorStatus};

use super::operations::reusable;

/// The index of a piece of memory.
pub(super) type Storage = usize;

/// The storages of all tensors so far.
#[derive(Debug, Default)]
pub(super) struct Storages {
    of: HashMap<TensorId, View>,
    bytes: Vec<u64>,
    /// For each storage, the number of tensors that share it and are not dropped.
    tensors: Vec<usize>,
}

/// The owner that keeps a storage alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// Only tensors hold the storage.
    Tensors,
    /// The autodiff graph also holds the storage: an operation of Burn saved it, or it contains a gradient.
    Graph,
    /// The training state holds the storage. It is a gradient buffer, which kernels write in place.
    State,
}

#[derive(Clone, Debug)]
struct View {
    storage: Storage,
    /// Strides in elements.
    strides: Vec<usize>,
}

/// Returns the bytes of a tensor that shares no memory.
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

/// Returns whether the elements are contiguous in row-major order.
fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let expected = row_major(shape);
    let dims = shape.iter().zip(strides).zip(expected);
    dims.into_iter()
        .all(|((len, stride), expected)| *len == 1 || *stride == expected)
}

impl Storages {
    /// Returns the storage of a tensor. A new tensor gets a new storage.
    pub fn of(&mut self, tensor: &TensorIr) -> Storage {
        match self.of.get(&tensor.id) {
            Some(view) => view.storage,
            None => self.make(tensor),
        }
    }

    /// Returns the number of storages.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the bytes of a storage.
    pub fn bytes(&self, storage: Storage) -> u64 {
        self.bytes[storage]
    }

    /// Gives a tensor the storage of another tensor.
    pub fn alias(&mut self, tensor: &TensorIr, storage: Storage) {
        let strides = row_major(&tensor.shape.to_vec());
        self.share(tensor, storage, strides);
    }

    fn share(&mut self, tensor: &TensorIr, storage: Storage, strides: Vec<usize>) {
        self.of.insert(tensor.id, View { storage, strides });
        self.tensors[storage] += 1;
    }

    /// Creates a storage of `bytes` bytes without a tensor.
    pub fn make_unnamed(&mut self, bytes: u64) -> Storage {
        self.bytes.push(bytes);
        self.tensors.push(0);
        self.bytes.len() - 1
    }

    /// Creates a storage for a tensor.
    pub fn make(&mut self, tensor: &TensorIr) -> Storage {
        let storage = self.make_unnamed(bytes_of(tensor));
        self.alias(tensor, storage);
        storage
    }

    /// Adds the outputs of an operation. Returns the storages that the operation creates. `holder` returns the holder
    /// of a storage.
    pub fn enter(
        &mut self,
        operation: &OperationIr,
        holder: impl Fn(Storage) -> Holder,
    ) -> Vec<Storage> {
        for input in operation.inputs() {
            self.of(input);
        }
        let mut made = vec![];
        if let Some((input, out, strides)) = self.view(operation) {
            let storage = self.of(input);
            self.share(out, storage, strides);
        } else {
            for out in operation.outputs() {
                match self.overwritten(operation, out, &holder) {
                    Some(storage) => self.alias(out, storage),
                    None => made.push(self.make(out)),
                }
            }
        }
        for input in operation.inputs() {
            if input.status == TensorStatus::ReadWrite {
                let storage = self.of(input);
                self.tensors[storage] = self.tensors[storage].saturating_sub(1);
            }
        }
        made
    }

    /// Returns the storage of an input that an operation overwrites with its output: a gradient buffer, or memory that
    /// no other tensor shares.
    fn overwritten(
        &self,
        operation: &OperationIr,
        out: &TensorIr,
        holder: impl Fn(Storage) -> Holder,
    ) -> Option<Storage> {
        let same = |input: &&TensorIr| (&input.shape, input.dtype) == (&out.shape, out.dtype);
        if let OperationIr::Custom(CustomOpIr { inputs, .. }) = operation {
            let mut storages = inputs.iter().filter(same).map(|it| self.of[&it.id].storage);
            let buffer = storages.find(|it| holder(*it) == Holder::State);
            if buffer.is_some() {
                return buffer;
            }
        }
        let is_free = |input: &&TensorIr| {
            let View { storage, strides } = &self.of[&input.id];
            let times = operation.inputs().filter(|it| it.id == input.id).count();
            input.status == TensorStatus::ReadWrite
                && (times, self.tensors[*storage]) == (1, 1)
                && is_contiguous(&input.shape.to_vec(), strides)
                && holder(*storage) == Holder::Tensors
        };
        let inputs = reusable(operation, out).into_iter();
        let input = inputs.filter(same).find(is_free)?;
        Some(self.of[&input.id].storage)
    }

    /// Returns the input, the output and the strides of the output, if the output is a view of the input.
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

#[cfg(test)]
mod tests {
    use burn_ir::{BinaryOpIr, NumericOperationIr};

    use super::*;

    fn tensor(id: u64, status: TensorStatus) -> TensorIr {
        TensorIr {
            id: TensorId::new(id),
            shape: [4, 8].into(),
            status,
            dtype: DType::F32,
        }
    }

    /// Returns whether the sum of tensors 0 and 1 reuses the memory of an operand.
    fn is_reused(statuses: [TensorStatus; 2], holder: Holder) -> bool {
        let mut storages = Storages::default();
        let [lhs, rhs] = [0, 1].map(|id| tensor(id, statuses[id as usize]));
        let known = [storages.of(&lhs), storages.of(&rhs)];
        let out = tensor(2, TensorStatus::NotInit);
        let sum = NumericOperationIr::Add(BinaryOpIr {
            lhs,
            rhs,
            out: out.clone(),
        });
        let made = storages.enter(&OperationIr::NumericFloat(DType::F32, sum), |_| holder);
        assert_eq!(made.is_empty(), known.contains(&storages.of(&out)));
        made.is_empty()
    }

    #[test]
    fn an_output_takes_memory_that_nothing_else_holds() {
        use TensorStatus::{ReadOnly, ReadWrite};
        assert!(is_reused([ReadWrite, ReadOnly], Holder::Tensors));
        assert!(is_reused([ReadOnly, ReadWrite], Holder::Tensors));
        assert!(!is_reused([ReadOnly, ReadOnly], Holder::Tensors));
        // The graph has saved the tensors.
        assert!(!is_reused([ReadWrite, ReadWrite], Holder::Graph));
    }

    /// A view of the input is still alive.
    #[test]
    fn an_output_does_not_take_memory_with_a_view() {
        let mut storages = Storages::default();
        let input = tensor(0, TensorStatus::ReadWrite);
        let storage = storages.of(&input);
        storages.alias(&tensor(1, TensorStatus::NotInit), storage);
        let scaled = NumericOperationIr::Add(BinaryOpIr {
            lhs: input,
            rhs: tensor(2, TensorStatus::ReadOnly),
            out: tensor(3, TensorStatus::NotInit),
        });
        let operation = OperationIr::NumericFloat(DType::F32, scaled);
        assert_eq!(storages.enter(&operation, |_| Holder::Tensors).len(), 1);
    }
}
