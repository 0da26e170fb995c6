//! The CubeCL kernels of the router. A cube processes one token.

use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;

use crate::cube::RowPlan;
use crate::cube::instance::AotList;
use crate::moe::score::ScoreFunction;

mod choose;
mod weights;

pub(super) use choose::choose;
pub(super) use weights::{gradient, weights};

/// The number of units of a cube, which is one plane and processes one token, and the kind of reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::moe) struct TokenCube {
    pub units: u32,
    pub planes: bool,
}

impl TokenCube {
    pub(in crate::moe) fn new(client: &Client, like: &CubeTensor) -> Self {
        let plan = RowPlan::new(client, like.dtype, 1);
        Self {
            units: plan.units,
            planes: plan.planes(),
        }
    }
}

/// The cube that AOT instances use.
pub(in crate::moe) const AOT_CUBE: TokenCube = TokenCube {
    units: 32,
    planes: true,
};

/// Returns all score functions with their names.
pub(in crate::moe) fn scores() -> [(&'static str, ScoreFunction); 4] {
    [
        ("softmax", ScoreFunction::Softmax),
        ("pre-softmax", ScoreFunction::PreSoftmax),
        ("sigmoid", ScoreFunction::Sigmoid),
        ("sqrt-softplus", ScoreFunction::SqrtSoftplus),
    ]
}

pub(crate) fn aot_instances(list: &mut AotList) {
    choose::aot_instances(list);
    weights::aot_instances(list);
}
