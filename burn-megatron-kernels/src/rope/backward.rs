//! The autodiff functions of rotations.

use std::sync::{Mutex, PoisonError};

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor};

use super::ops::{RotateOp, Rotation};
use super::{MlaDims, Positions, RopeTable, RotaryHeads};
use crate::function::{Function, Gradients, Tensors, apply};
use crate::launch::{exactly, launch};

/// The table and the positions of one call, as inputs of launches.
#[derive(Clone, Debug)]
struct AngleInputs {
    cosine: Tensor<2>,
    sine: Tensor<2>,
    each: Option<Tensor<2, Int>>,
    start: usize,
}

impl AngleInputs {
    fn new(table: &RopeTable, positions: &Positions) -> Self {
        let (cosine, sine) = table.parts();
        let last = table.rows() as i64 - 1;
        let (start, each) = match positions {
            Positions::From(start) => (*start, None),
            Positions::Each(each) => {
                let each = each.clone().inner();
                // Kernels clamp too; a wider type must not wrap around before they do.
                let each = match each.dtype() {
                    DType::I32 => each,
                    _ => each.clamp(0, last).cast(DType::I32),
                };
                (0, Some(each))
            }
        };
        Self {
            cosine,
            sine,
            each,
            start,
        }
    }

    /// The inputs of a launch: the given tensors, then the angles.
    fn after(&self, tensors: Tensors) -> Tensors {
        let table = [self.cosine.clone(), self.sine.clone()].map(Tensor::into_dispatch);
        let each = self.each.clone().map(Tensor::into_dispatch);
        tensors.into_iter().chain(table).chain(each).collect()
    }

    /// Launches a rotation of `tensors`.
    fn launch(&self, rotation: Rotation, heads: RotaryHeads, tensors: Tensors) -> Tensors {
        let start = self.start;
        let op = RotateOp {
            rotation,
            heads,
            start,
        };
        launch(op, self.after(tensors))
    }

    fn rotate(&self, x: DispatchTensor, heads: RotaryHeads, back: bool) -> DispatchTensor {
        self.launch(Rotation::Heads { back }, heads, vec![x])
            .remove(0)
    }
}

pub(super) fn rotate(
    x: Tensor<4>,
    table: &RopeTable,
    positions: &Positions,
    heads: RotaryHeads,
) -> Tensor<4> {
    let angles = AngleInputs::new(table, positions);
    apply(vec![x.into_dispatch()], Rotate { angles, heads })
}

/// Rotates its input; saves nothing for the backward.
#[derive(Debug)]
struct Rotate {
    angles: AngleInputs,
    heads: RotaryHeads,
}

impl Function for Rotate {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let y = self.angles.rotate(inputs.remove(0), self.heads, false);
        (y, vec![])
    }

    /// The transpose of a rotation, its concentration included, is the one by the negative angle.
    fn backward(&self, _saved: Tensors, gradient: DispatchTensor, _needed: &[bool]) -> Gradients {
        vec![Some(self.angles.rotate(gradient, self.heads, true))]
    }
}

/// Queries and keys.
///
/// An autodiff function has one output, so there are two: the function of the queries runs the
/// launch, for which keys and values are constants, and the function of the keys takes the keys
/// that it computed.
pub(super) fn rotate_mla(
    (q, kv, k_rope): (Tensor<4>, Tensor<4>, Tensor<3>),
    mla: MlaDims,
    table: &RopeTable,
    positions: &Positions,
    heads: RotaryHeads,
) -> (Tensor<4>, Tensor<4>) {
    let angles = AngleInputs::new(table, positions);
    let made = std::sync::Arc::new(Mutex::new(None));
    let constants = [
        kv.clone().inner().into_dispatch(),
        k_rope.clone().inner().into_dispatch(),
    ];
    let queries = RotateMlaQueries {
        angles: angles.clone(),
        heads,
        mla,
        keys: made.clone(),
    };
    let [kv_constant, k_constant] = constants;
    let q = apply(vec![q.into_dispatch(), kv_constant, k_constant], queries);
    let keys = RotateMlaKeys {
        angles,
        heads,
        mla,
        keys: made,
    };
    let k = apply(vec![kv.into_dispatch(), k_rope.into_dispatch()], keys);
    (q, k)
}

/// The keys, passed from the forward of the queries to that of the keys.
type MlaKeysSlot = std::sync::Arc<Mutex<Option<DispatchTensor>>>;

#[derive(Debug)]
struct RotateMlaQueries {
    angles: AngleInputs,
    heads: RotaryHeads,
    mla: MlaDims,
    keys: MlaKeysSlot,
}

impl Function for RotateMlaQueries {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let outputs = self
            .angles
            .launch(Rotation::Mla(self.mla), self.heads, inputs);
        let [queries, keys] = exactly(outputs);
        *self.keys.lock().unwrap_or_else(PoisonError::into_inner) = Some(keys);
        (queries, vec![])
    }

    fn backward(&self, _saved: Tensors, gradient: DispatchTensor, _needed: &[bool]) -> Gradients {
        let gradient = self.angles.rotate(gradient, self.heads, true);
        vec![Some(gradient), None, None]
    }
}

#[derive(Debug)]
struct RotateMlaKeys {
    angles: AngleInputs,
    heads: RotaryHeads,
    mla: MlaDims,
    keys: MlaKeysSlot,
}

impl Function for RotateMlaKeys {
    fn forward(&self, _inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let keys = self
            .keys
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match keys {
            Some(keys) => (keys, vec![]),
            None => unreachable!("the step of the queries has run before and made the keys"),
        }
    }

    fn backward(&self, _saved: Tensors, gradient: DispatchTensor, _needed: &[bool]) -> Gradients {
        let rotation = Rotation::MlaBack(self.mla);
        let gradients = self.angles.launch(rotation, self.heads, vec![gradient]);
        gradients.into_iter().map(Some).collect()
    }
}
