//! Converts the states of Burn's element-wise optimizers to and from flat tensors.

use std::collections::BTreeMap;

use burn::optim::momentum::MomentumState;
use burn::optim::{
    AdaGrad, AdaGradState, Adam, AdamState, Adan, AdanState, AdaptiveMomentumState,
    AdaptiveNesterovMomentumState, CenteredState, Lion, LionState, LrDecayState, Optimizer,
    RmsProp, RmsPropMomentumState, RmsPropState, Sgd, SgdState, SquareAvgState,
};
use burn::tensor::Tensor;

/// The tensors of an optimizer's state on a shard, keyed by their names in Burn's record of the state.
pub type StateTensors = BTreeMap<String, Tensor<1>>;

/// An element-wise optimizer whose state can be restored from a checkpoint in any layout. Each tensor of the state has
/// one element for each element of the parameter. The rest of the state is computed from the number of steps.
pub trait ResumableOptimizer: Optimizer {
    /// The name of the optimizer, which is the prefix of the keys of its state tensors.
    const NAME: &'static str;

    /// The names of the state tensors that are not saved, because the next step does not read them.
    const UNSAVED: &'static [&'static str] = &[];

    /// Creates the optimizer state after `steps` steps from the saved tensors. Returns `None` if a tensor is missing.
    fn restored(steps: usize, tensors: StateTensors) -> Option<Self::State<1>>;
}

impl ResumableOptimizer for Sgd {
    const NAME: &'static str = "sgd";

    fn restored(_: usize, mut tensors: StateTensors) -> Option<SgdState<1>> {
        let velocity = tensors.remove("momentum.velocity");
        Some(SgdState::new(velocity.map(MomentumState::new)))
    }
}

impl ResumableOptimizer for Adam {
    const NAME: &'static str = "adam";

    fn restored(steps: usize, mut tensors: StateTensors) -> Option<AdamState<1>> {
        let [first, second] = ["momentum.moment_1", "momentum.moment_2"];
        let (first, second) = (tensors.remove(first)?, tensors.remove(second)?);
        let momentum = AdaptiveMomentumState {
            max_moment_2: tensors.remove("momentum.max_moment_2"),
            ..AdaptiveMomentumState::new(steps, first, second)
        };
        Some(AdamState::new(momentum))
    }
}

impl ResumableOptimizer for Adan {
    const NAME: &'static str = "adan";

    fn restored(steps: usize, mut tensors: StateTensors) -> Option<AdanState<1>> {
        let mut take = |name: &str| tensors.remove(&format!("momentum.{name}"));
        Some(AdanState::new(AdaptiveNesterovMomentumState::new(
            steps,
            take("exp_avg")?,
            take("exp_avg_sq")?,
            take("exp_avg_diff")?,
            take("neg_pre_grad")?,
        )))
    }
}

impl ResumableOptimizer for Lion {
    const NAME: &'static str = "lion";

    fn restored(_: usize, mut tensors: StateTensors) -> Option<LionState<1>> {
        tensors.remove("momentum").map(LionState::new)
    }
}

impl ResumableOptimizer for RmsProp {
    const NAME: &'static str = "rmsprop";

    /// The average is recomputed from the other two tensors.
    const UNSAVED: &'static [&'static str] = &["centered.avg"];

    fn restored(_: usize, mut tensors: StateTensors) -> Option<RmsPropState<1>> {
        let squares = tensors.remove("square_avg.square_avg")?;
        let mean = tensors.remove("centered.grad_avg");
        let velocity = tensors.remove("momentum.buf");
        Some(RmsPropState::new(
            SquareAvgState::new(squares.clone()),
            CenteredState::new(mean, squares),
            velocity.map(RmsPropMomentumState::new),
        ))
    }
}

impl ResumableOptimizer for AdaGrad {
    const NAME: &'static str = "adagrad";

    fn restored(steps: usize, mut tensors: StateTensors) -> Option<AdaGradState<1>> {
        let sum = tensors.remove("lr_decay.sum")?;
        Some(AdaGradState::new(LrDecayState::new(steps, sum)))
    }
}
