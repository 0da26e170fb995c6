//! What both ranks of a transfer know of its tensor before it is sent.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;

use crate::collective::wire_dtype;
use crate::comm;

/// What the shapes of a micro-batch depend on, as `[batch, seq]`; see [`Stage::size`](super::super::Stage::size).
pub type MicroBatchSize = [usize; 2];

/// The shape and the type of a tensor between two stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorSpec {
    pub shape: [usize; 3],
    pub dtype: DType,
}

impl TensorSpec {
    pub fn of(x: &Tensor<3>) -> Self {
        let dtype = match x.dtype() {
            // As engines send it.
            DType::Flex32 => DType::F32,
            dtype => dtype,
        };
        let shape = x.dims();
        Self { shape, dtype }
    }

    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl fmt::Display for TensorSpec {
    /// `[2, 16, 64] of f32`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {}", self.shape, self.dtype.name())
    }
}

/// The shapes that the ranks of a pipeline have agreed on. Clones share them.
///
/// The first micro-batch of a [size](MicroBatchSize) is preceded by the shape and the type of its activation, on each way
/// between two stages; later ones of this size have the same. So a run with sizes that were seen before sends nothing
/// but tensors. Pass the same value to all runs of a pipeline, on every rank: all have it from the start, or none.
#[derive(Clone, Debug, Default)]
pub struct AgreedShapes(Arc<Mutex<Agreed>>);

#[derive(Debug, Default)]
struct Agreed {
    /// By micro-batch of the last run of a schedule.
    sizes: Vec<MicroBatchSize>,
    /// By the stage that returns it, and the size of the micro-batch.
    activations: HashMap<(usize, MicroBatchSize), TensorSpec>,
}

impl AgreedShapes {
    pub(super) fn get(&self, stage: usize, size: MicroBatchSize) -> Option<TensorSpec> {
        self.0.lock().activations.get(&(stage, size)).copied()
    }

    pub(super) fn insert(&self, stage: usize, size: MicroBatchSize, spec: TensorSpec) {
        self.0.lock().activations.insert((stage, size), spec);
    }

    /// Sets the sizes of a run; returns whether they differ from those of the last run.
    pub(super) fn set_sizes(&self, sizes: &[MicroBatchSize]) -> bool {
        let mut agreed = self.0.lock();
        let differs = agreed.sizes != sizes;
        if differs {
            agreed.sizes = sizes.to_vec();
        }
        differs
    }
}

/// What precedes the first activation of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShapeNotice {
    pub stage: usize,
    pub micro_batch: usize,
    pub size: MicroBatchSize,
    pub spec: TensorSpec,
}

impl ShapeNotice {
    /// The numbers of a notice.
    pub const LEN: usize = 8;

    pub fn to_numbers(self) -> Vec<i64> {
        let wire = wire_dtype(self.spec.dtype);
        let dtype = comm::DType::ALL.into_iter().position(|dtype| dtype == wire);
        let [rows, seq] = self.size;
        let [batch, len, hidden] = self.spec.shape;
        let numbers = [
            self.stage,
            self.micro_batch,
            rows,
            seq,
            batch,
            len,
            hidden,
            dtype.expect("the list has all types"),
        ];
        numbers.map(|number| number as i64).to_vec()
    }

    /// `None` for numbers that are no notice.
    pub fn from_numbers(numbers: &[i64]) -> Option<Self> {
        let number = |i: usize| usize::try_from(*numbers.get(i)?).ok();
        let dtype = *comm::DType::ALL.get(number(7)?)?;
        Some(Self {
            stage: number(0)?,
            micro_batch: number(1)?,
            size: [number(2)?, number(3)?],
            spec: TensorSpec {
                shape: [number(4)?, number(5)?, number(6)?],
                dtype: float_type(dtype)?,
            },
        })
    }
}

/// The type of the tensors that are sent as this one.
fn float_type(wire: comm::DType) -> Option<DType> {
    match wire {
        comm::DType::F64 => Some(DType::F64),
        comm::DType::F32 => Some(DType::F32),
        comm::DType::BF16 => Some(DType::BF16),
        comm::DType::F16 => Some(DType::F16),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_read_as_it_is_written() {
        let float = [DType::F64, DType::F32, DType::BF16, DType::F16];
        for (i, dtype) in float.into_iter().enumerate() {
            let shape = [2, 3 + i, 4];
            let notice = ShapeNotice {
                stage: 1,
                micro_batch: 7,
                size: [2, 6],
                spec: TensorSpec { shape, dtype },
            };
            let numbers = notice.to_numbers();
            assert_eq!(numbers.len(), ShapeNotice::LEN);
            assert_eq!(ShapeNotice::from_numbers(&numbers), Some(notice));
            // Integers are no type of an activation, and a negative size is none.
            let with = |at: usize, number: i64| {
                let mut numbers = numbers.clone();
                numbers[at] = number;
                ShapeNotice::from_numbers(&numbers)
            };
            assert_eq!(with(7, 4), None);
            assert_eq!(with(7, 99), None);
            assert_eq!(with(4, -1), None);
            assert_eq!(ShapeNotice::from_numbers(&numbers[1..]), None);
        }
    }
}
