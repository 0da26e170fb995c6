//! Runs one forward and one backward.

use std::any::Any;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};

use super::Batch;
use super::place::place_with_gradients;

/// The results of a step.
pub(super) struct Step {
    pub loss: f64,
    /// The sensitivity of the loss to relative changes of the parameters: the norm of the elementwise products of
    /// parameters and gradients.
    pub sensitivity: f64,
    /// The path and the gradient of each parameter, in the order of the module. `None` if the loss does not depend on
    /// the parameter.
    pub gradients: Vec<(String, Option<Vec<f64>>)>,
}

/// Runs a step. A panic is returned as an error.
pub(super) fn run<M: Module, B: Batch>(
    model: &M,
    batch: &B,
    loss: impl Fn(&M, &B) -> Tensor<1>,
    device: &Device,
    float: Option<DType>,
) -> Result<Step, String> {
    caught(|| {
        let device = device.clone().without_autodiff();
        let model = place_with_gradients(model, &device, float);
        let loss = loss(&model, &batch.on(&device.autodiff(), float));
        if loss.dims() != [1] {
            return Err(format!(
                "the loss has the shape {:?}: expected [1]",
                loss.dims()
            ));
        }
        let value = floats(loss.to_data())[0];
        let (gradients, squares) = if loss.is_autodiff() && loss.is_tracked() {
            let gradients = loss.backward();
            let mut collect = Collect {
                gradients: &gradients,
                path: vec![],
                seen: HashSet::new(),
                found: vec![],
                squares: 0.0,
            };
            model.visit(&mut collect);
            (collect.found, collect.squares)
        } else {
            (vec![], 0.0)
        };
        Ok(Step {
            loss: value,
            sensitivity: squares.sqrt(),
            gradients,
        })
    })?
}

/// Returns the result of `body`. A panic is returned as an error with its message.
pub(super) fn caught<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| message(&*panic))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "it panicked".into())
}

pub(super) fn floats(data: TensorData) -> Vec<f64> {
    data.iter::<f64>().collect()
}

struct Collect<'a> {
    gradients: &'a Gradients,
    path: Vec<String>,
    seen: HashSet<ParamId>,
    found: Vec<(String, Option<Vec<f64>>)>,
    /// The sum of the squares of the products of parameter and gradient.
    squares: f64,
}

impl ModuleVisitor for Collect<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        if tensor.is_require_grad() && self.seen.insert(param.id) {
            let gradient = tensor.grad(self.gradients);
            let gradient = gradient.map(|gradient| floats(gradient.into_data()));
            let values = floats(tensor.inner().into_data());
            let products = values.iter().zip(gradient.iter().flatten());
            self.squares += products.map(|(x, g)| (x * g).powi(2)).sum::<f64>();
            self.found.push((self.path.join("."), gradient));
        }
    }
}
