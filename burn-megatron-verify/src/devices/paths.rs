//! The module paths of recorded parameters.

use std::collections::HashMap;

use burn::module::{ModuleVisitor, Param};
use burn::tensor::{Int, Tensor};
use burn_ir::TensorId;
use burn_megatron_kernels::record::tensor_id;

/// The paths of the parameters of a module on the recording device.
#[derive(Default)]
pub(super) struct Paths {
    path: Vec<String>,
    pub found: HashMap<TensorId, String>,
}

impl Paths {
    fn add(&mut self, id: Option<TensorId>) {
        if let Some(id) = id {
            self.found.entry(id).or_insert_with(|| self.path.join("."));
        }
    }
}

impl ModuleVisitor for Paths {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(tensor_id(&param.base()));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(tensor_id(&param.base()));
    }
}
