//! The rotations as autodiff functions.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor};

use super::ops::{RotateOp, Rotation};
use super::{MlaDims, Positions, RopeTable, RotaryHeads};
use crate::function::{Function, Gradients, Tensors, apply};
use crate::launch::{exactly, launch};

/// The table and the positions of a rotation, which are inputs of its launch.
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
                // The kernels clamp positions too, but a wider type must not wrap around before this.
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

    /// Returns the inputs of a launch: the tensors, followed by the table and the positions.
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

/// The function that rotates its input. It saves no tensor for the backward pass.
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

    /// Rotates by the negative angle. This is the transpose of the rotation, including the scaling of cosines and
    /// sines.
    fn backward(&self, _saved: Tensors, gradient: DispatchTensor, _needed: &[bool]) -> Gradients {
        vec![Some(self.angles.rotate(gradient, self.heads, true))]
    }
}

/// Rotates the queries and keys of multi-head latent attention.
///
/// An autodiff function has one output, so there are two functions. The function of the queries launches the kernel,
/// with keys and values as constants. The function of the keys takes the keys that this kernel has computed.
pub(super) fn rotate_mla(
    (q, kv, k_rope): (Tensor<4>, Tensor<4>, Tensor<3>),
    mla: MlaDims,
    table: &RopeTable,
    positions: &Positions,
    heads: RotaryHeads,
) -> (Tensor<4>, Tensor<4>) {
    let constants = [
        kv.clone().inner().into_dispatch(),
        k_rope.clone().inner().into_dispatch(),
    ];
    let rotation = MlaRotation {
        angles: AngleInputs::new(table, positions),
        heads,
        mla,
        keys: MlaKeysSlot::default(),
    };
    let [kv_constant, k_constant] = constants;
    let queries = RotateMlaQueries(rotation.clone());
    let q = apply(vec![q.into_dispatch(), kv_constant, k_constant], queries);
    let keys = vec![kv.into_dispatch(), k_rope.into_dispatch()];
    (q, apply(keys, RotateMlaKeys(rotation)))
}

/// The keys, passed from the forward pass of the queries to the forward pass of the keys.
type MlaKeysSlot = Arc<Mutex<Option<DispatchTensor>>>;

#[derive(Clone, Debug)]
struct MlaRotation {
    angles: AngleInputs,
    heads: RotaryHeads,
    mla: MlaDims,
    keys: MlaKeysSlot,
}

impl MlaRotation {
    fn launch(&self, rotation: Rotation, tensors: Tensors) -> Tensors {
        self.angles.launch(rotation, self.heads, tensors)
    }

    fn keys(&self) -> MutexGuard<'_, Option<DispatchTensor>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct RotateMlaQueries(MlaRotation);

impl Function for RotateMlaQueries {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let [queries, keys] = exactly(self.0.launch(Rotation::Mla(self.0.mla), inputs));
        *self.0.keys() = Some(keys);
        (queries, vec![])
    }

    fn backward(&self, _saved: Tensors, gradient: DispatchTensor, _needed: &[bool]) -> Gradients {
        let gradient = self.0.angles.rotate(gradient, self.0.heads, true);
        vec![Some(gradient), None, None]
    }
}

#[derive(Debug)]
struct RotateMlaKeys(MlaRotation);

impl Function for RotateMlaKeys {
    fn forward(&self, _inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        match self.0.keys().take() {
            Some(keys) => (keys, vec![]),
            None => unreachable!("the step of the queries has run before and made the keys"),
        }
    }

    fn backward(&self, _saved: Tensors, gradient: DispatchTensor, _needed: &[bool]) -> Gradients {
        let rotation = Rotation::MlaBack(self.0.mla);
        let gradients = self.0.launch(rotation, vec![gradient]);
        gradients.into_iter().map(Some).collect()
    }
}
