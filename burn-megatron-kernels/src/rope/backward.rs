//! The recorded forms: what a rotation gives to the gradients.

use std::sync::{Mutex, PoisonError};

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor};

use super::forms::{Keys, KeysBack, Turn};
use super::{Heads, Latent, Positions, RopeTable};
use crate::launch::{launch, launch_one};
use crate::{Function, apply};

/// The table and the positions of one call, on their way to launches.
#[derive(Clone, Debug)]
struct Angles {
    cosine: Tensor<2>,
    sine: Tensor<2>,
    each: Option<Tensor<2, Int>>,
    start: usize,
}

impl Angles {
    fn new(table: &RopeTable, positions: &Positions) -> Self {
        let (cosine, sine) = table.parts();
        let last = table.max_positions() as i64 - 1;
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
    fn after(&self, tensors: impl IntoIterator<Item = DispatchTensor>) -> Vec<DispatchTensor> {
        let table = [self.cosine.clone(), self.sine.clone()].map(Tensor::into_dispatch);
        let each = self.each.clone().map(Tensor::into_dispatch);
        tensors.into_iter().chain(table).chain(each).collect()
    }

    fn turn(&self, x: DispatchTensor, heads: Heads, back: bool) -> DispatchTensor {
        let start = self.start;
        launch_one(Turn { heads, start, back }, self.after([x]))
    }
}

pub(super) fn rotate(
    x: Tensor<4>,
    table: &RopeTable,
    positions: &Positions,
    heads: Heads,
) -> Tensor<4> {
    let angles = Angles::new(table, positions);
    apply(vec![x.into_dispatch()], Rotate { angles, heads })
}

/// Turns its input; needs nothing of the forward.
#[derive(Debug)]
struct Rotate {
    angles: Angles,
    heads: Heads,
}

impl Function for Rotate {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let y = self.angles.turn(inputs.remove(0), self.heads, false);
        (y, vec![])
    }

    /// The transpose of a rotation, its concentration included, is the one by the negative angle.
    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        vec![Some(self.angles.turn(gradient, self.heads, true))]
    }
}

/// Queries and keys.
///
/// A recorded step has one output, so there are two: the step of the queries runs the launch, for
/// which keys and values are constants, and the step of the keys takes over what it made for them.
pub(super) fn rotate_mla(
    (q, kv, k_turned): (Tensor<4>, Tensor<4>, Tensor<3>),
    latent: Latent,
    table: &RopeTable,
    positions: &Positions,
    heads: Heads,
) -> (Tensor<4>, Tensor<4>) {
    let angles = Angles::new(table, positions);
    let made = std::sync::Arc::new(Mutex::new(None));
    let constants = [
        kv.clone().inner().into_dispatch(),
        k_turned.clone().inner().into_dispatch(),
    ];
    let queries = RotateQueries {
        angles: angles.clone(),
        heads,
        latent,
        keys: made.clone(),
    };
    let [kv_constant, k_constant] = constants;
    let q = apply(vec![q.into_dispatch(), kv_constant, k_constant], queries);
    let keys = JoinKeys {
        angles,
        heads,
        latent,
        keys: made,
    };
    let k = apply(vec![kv.into_dispatch(), k_turned.into_dispatch()], keys);
    (q, k)
}

/// Keys on their way from one step's forward to the other's.
type Handover = std::sync::Arc<Mutex<Option<DispatchTensor>>>;

#[derive(Debug)]
struct RotateQueries {
    angles: Angles,
    heads: Heads,
    latent: Latent,
    keys: Handover,
}

impl Function for RotateQueries {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let kernel = Keys {
            heads: self.heads,
            latent: self.latent,
            start: self.angles.start,
        };
        let mut outputs = launch(kernel, self.angles.after(inputs));
        let keys = outputs.remove(1);
        *self.keys.lock().unwrap_or_else(PoisonError::into_inner) = Some(keys);
        (outputs.remove(0), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let gradient = self.angles.turn(gradient, self.heads, true);
        vec![Some(gradient), None, None]
    }
}

#[derive(Debug)]
struct JoinKeys {
    angles: Angles,
    heads: Heads,
    latent: Latent,
    keys: Handover,
}

impl Function for JoinKeys {
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

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let kernel = KeysBack {
            heads: self.heads,
            latent: self.latent,
            start: self.angles.start,
        };
        let gradients = launch(kernel, self.angles.after([gradient]));
        gradients.into_iter().map(Some).collect()
    }
}
