//! Running states: tensors that the forward of a module updates, such as the running mean of Burn's `BatchNorm`.
//!
//! A module visitor visits running states like parameters. But a running state has no gradient, and a hook cannot
//! supply its value. Therefore running states are listed with the [frozen](super::frozen) parameters, whose buckets
//! hold the values for checkpoints. On each rank, the module holds its own value, which the forwards of this rank
//! update. If the ranks need a common value, it is the mean of the values over the data axis. Updates are linear, so
//! averaging once gives the same value as averaging after each update.

use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

/// Returns for each parameter of a module whether it is a running state. The list is in the order of the module.
///
/// The function assigns new ids with a module mapper. A parameter takes the new id, whereas a running state keeps its
/// id.
pub fn running_states<M: Module>(module: &M) -> Vec<bool> {
    let mut ids = Ids {
        given: ParamId::new(),
        are_kept: vec![],
    };
    let module = module.clone().map(&mut ids);
    module.visit(&mut ids);
    ids.are_kept
}

struct Ids {
    given: ParamId,
    are_kept: Vec<bool>,
}

impl ModuleMapper for Ids {
    fn map_float<const D: usize>(&mut self, mut param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.id = self.given;
        param
    }
}

impl ModuleVisitor for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.are_kept.push(param.id != self.given);
    }
}

/// Returns a module with separate running states, without autodiff. The clones of a module share a running
/// state and its lock, and the ranks of a process have clones. A rank that holds the lock while it waits for
/// another rank would wait forever.
pub(super) fn unshared<M: Module>(module: &M) -> M {
    // A validation snapshot is Burn's way to copy running states. It turns off training flags, such as the flag
    // of dropout.
    module.valid().map(&mut TrainingFlags)
}

struct TrainingFlags;

impl ModuleMapper for TrainingFlags {
    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        flag.train()
    }
}
