//! The only module that uses the backend traits of Burn.
//!
//! One extension operation runs every [`Function`](super::Function). It converts the primitive tensors of the backend
//! to `DispatchTensor`s before the call and converts the results back, on any backend.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, BackendTensor, Capture, DispatchAutodiffContext, DispatchKindConversion,
    DispatchTensor, DispatchTensorKind, ExtensionType, Flex, backend_extension,
};

use super::observe::{ObservedCall, ObservedForward};
use super::{MAX_INPUTS, SharedFunction};
use crate::record::run_function;

/// A list of float tensors of one backend.
///
/// `#[backend_extension]` does not support `Vec` arguments, so the conversion is written by hand.
pub struct TensorList<B: Backend>(pub Vec<FloatTensor<B>>);

impl<B: Backend> ExtensionType<B> for TensorList<B> {
    type Target = TensorList<burn::backend::Dispatch>;

    fn map_to_dispatch<F>(self, wrap: F, autodiff: DispatchAutodiffContext) -> Self::Target
    where
        F: Fn(BackendTensor<B>) -> DispatchTensorKind,
    {
        let wrap = |tensor| DispatchTensor {
            kind: wrap(BackendTensor::Float(tensor)),
            autodiff,
        };
        TensorList(self.0.into_iter().map(wrap).collect())
    }

    fn map_from_dispatch<F>(target: Self::Target, unwrap: F) -> Self
    where
        F: Fn(DispatchTensor) -> BackendTensor<B>,
    {
        let tensors = target.0.into_iter().map(|tensor| unwrap(tensor).float());
        TensorList(tensors.collect())
    }

    fn routing_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        target.0.first()
    }

    fn routing_float_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        target.0.first()
    }

    fn autodiff_context(target: &Self::Target) -> DispatchAutodiffContext {
        let contexts = target.0.iter().map(|tensor| tensor.autodiff);
        contexts.fold(DispatchAutodiffContext::Disabled, |all, one| all.merge(one))
    }
}

#[backend_extension(
    Flex,
    Capture,
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
    Autodiff
)]
pub trait FunctionOps: Backend {
    /// Runs a function on the tensors of one backend.
    fn apply_function(
        #[extension_type] inputs: TensorList<Self>,
        function: SharedFunction,
    ) -> TensorList<Self>;
}

impl FunctionOps for Flex {
    fn apply_function(inputs: TensorList<Self>, function: SharedFunction) -> TensorList<Self> {
        TensorList(forward::<Self>(inputs.0, &function).0)
    }
}

/// Runs the function on the shape-only backend, without values.
impl FunctionOps for Capture {
    fn apply_function(inputs: TensorList<Self>, function: SharedFunction) -> TensorList<Self> {
        TensorList(run_function(inputs.0, function))
    }
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
impl FunctionOps for burn::backend::Cube {
    fn apply_function(inputs: TensorList<Self>, function: SharedFunction) -> TensorList<Self> {
        TensorList(forward::<Self>(inputs.0, &function).0)
    }
}

impl<B: Backend, C: CheckpointStrategy> FunctionOps for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn apply_function(inputs: TensorList<Self>, function: SharedFunction) -> TensorList<Self> {
        TensorList(match inputs.0.len() {
            1 => record::<B, C, 1>(inputs.0, function),
            2 => record::<B, C, 2>(inputs.0, function),
            3 => record::<B, C, 3>(inputs.0, function),
            4 => record::<B, C, 4>(inputs.0, function),
            5 => record::<B, C, 5>(inputs.0, function),
            6 => record::<B, C, 6>(inputs.0, function),
            7 => record::<B, C, 7>(inputs.0, function),
            n => panic!("a function takes 1 to {MAX_INPUTS} inputs, {function:?} was given {n}"),
        })
    }
}

fn wrap<B: Backend>(tensor: FloatTensor<B>) -> DispatchTensor
where
    DispatchTensor: DispatchKindConversion<B>,
{
    <DispatchTensor as DispatchKindConversion<B>>::from_backend(BackendTensor::Float(tensor))
}

fn unwrap<B: Backend>(tensor: DispatchTensor, function: &SharedFunction) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    match <DispatchTensor as DispatchKindConversion<B>>::try_into_backend(tensor) {
        Ok(tensor) => tensor.float(),
        Err(_) => panic!("{function:?} returned a tensor on a different backend than its inputs"),
    }
}

pub(crate) fn forward<B: Backend>(
    inputs: Vec<FloatTensor<B>>,
    function: &SharedFunction,
) -> (Vec<FloatTensor<B>>, Vec<DispatchTensor>)
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let (outputs, saved, _) = observed_forward::<B>(inputs, function);
    (outputs, saved)
}

/// Computes the forward pass. If there is an observer, also returns the observed call for the backward pass.
fn observed_forward<B: Backend>(
    inputs: Vec<FloatTensor<B>>,
    function: &SharedFunction,
) -> (
    Vec<FloatTensor<B>>,
    Vec<DispatchTensor>,
    Option<ObservedCall>,
)
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let inputs: Vec<_> = inputs.into_iter().map(wrap::<B>).collect();
    let observed = ObservedForward::begin(&inputs);
    let (mut outputs, saved) = function.0.forward(inputs);
    let observed = observed.map(|observed| observed.end(&function.name(), &mut outputs));
    let outputs = outputs.into_iter();
    let outputs = outputs.map(|output| unwrap::<B>(output, function));
    (outputs.collect(), saved, observed)
}

/// The gradients of the outputs of one call that the backward pass has computed so far.
type OutputGradients<B> = Arc<Mutex<Vec<Option<FloatTensor<B>>>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The recorded autodiff step of a function with `N` inputs.
///
/// If the function has a single output, its node in the graph is the output. If it has several outputs, each output is
/// a [`RecordedOutput`] that depends on the node of the function. The backward steps of the outputs run before this
/// step and store their gradients in its state.
#[derive(Debug)]
struct RecordedFunction;

impl<B: Backend, const N: usize> Backward<B, N> for RecordedFunction
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = (
        SharedFunction,
        Vec<DispatchTensor>,
        Option<OutputGradients<B>>,
        Option<ObservedCall>,
    );

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (function, saved, of_outputs, observed) = ops.state;
        let of_outputs = match of_outputs {
            Some(of_outputs) => std::mem::take(&mut *lock(&of_outputs)),
            None => vec![Some(gradients.consume::<B>(&ops.node))],
        };
        let of_outputs: Vec<_> = of_outputs.into_iter().map(|it| it.map(wrap::<B>)).collect();
        let needed = ops.parents.each_ref().map(Option::is_some);
        let run = |of_outputs| function.0.backward(saved, of_outputs, &needed);
        let parents = match observed {
            Some(observed) => observed.backward(&function.name(), of_outputs, run),
            None => run(of_outputs),
        };
        for (parent, gradient) in ops.parents.iter().zip(parents) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                gradients.register::<B>(parent.id, unwrap::<B>(gradient, &function));
            }
        }
    }
}

/// The recorded autodiff step of one output of a function with several outputs.
#[derive(Debug)]
struct RecordedOutput;

impl<B: Backend> Backward<B, 1> for RecordedOutput {
    type State = (OutputGradients<B>, usize);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (of_outputs, index) = ops.state;
        lock(&of_outputs)[index] = Some(gradients.consume::<B>(&ops.node));
    }
}

fn record<B: Backend, C: CheckpointStrategy, const N: usize>(
    inputs: Vec<FloatTensor<Autodiff<B, C>>>,
    function: SharedFunction,
) -> Vec<FloatTensor<Autodiff<B, C>>>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let (primitives, guards): (Vec<_>, Vec<_>) =
        inputs.into_iter().map(|tensor| tensor.into_parts()).unzip();
    let Ok(guards) = <[_; N]>::try_from(guards) else {
        unreachable!("`record` is called with N inputs")
    };
    let step = <RecordedFunction as Backward<B, N>>::prepare::<C>(RecordedFunction, guards);
    let (outputs, saved, observed) = observed_forward::<B>(primitives, &function);
    let several = outputs.len() > 1;
    let of_outputs = several.then(|| Arc::new(Mutex::new(vec![None; outputs.len()])));
    // If there are several outputs, the value of this node is never read.
    let first = outputs[0].clone();
    let node = match step.compute_bound().stateful() {
        OpsKind::Tracked(step) => {
            step.finish((function, saved, of_outputs.clone(), observed), first)
        }
        OpsKind::UnTracked(step) => step.finish(first),
    };
    let Some(of_outputs) = of_outputs else {
        return vec![node];
    };
    let outputs = outputs.into_iter().enumerate();
    let output = |(index, output)| {
        let guards = [node.node()];
        let step = <RecordedOutput as Backward<B, 1>>::prepare::<C>(RecordedOutput, guards);
        match step.compute_bound().stateful() {
            OpsKind::Tracked(step) => step.finish((of_outputs.clone(), index), output),
            OpsKind::UnTracked(step) => step.finish(output),
        }
    };
    outputs.map(output).collect()
}
