//! The only module that uses the backend traits of Burn.
//!
//! One extension operation serves every [`Function`](super::Function): its primitives are wrapped
//! into `DispatchTensor`s on the way in and unwrapped on the way out, on any backend.

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, BackendTensor, DispatchAutodiffContext, DispatchKindConversion, DispatchTensor,
    DispatchTensorKind, ExtensionType, Flex, backend_extension,
};

use super::{MAX_INPUTS, SharedFunction};

/// Float tensors of one backend, as many as the function takes.
///
/// `#[backend_extension]` does not understand `Vec` arguments, so the conversion is by hand.
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
        TensorList(
            target
                .0
                .into_iter()
                .map(|tensor| unwrap(tensor).float())
                .collect(),
        )
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

#[backend_extension(Flex, Cube: cfg(any(feature = "cuda", feature = "wgpu")), Autodiff)]
pub trait FunctionOps: Backend {
    /// Runs a function on the tensors of one backend.
    fn apply_function(
        #[extension_type] inputs: TensorList<Self>,
        function: SharedFunction,
    ) -> FloatTensor<Self>;
}

impl FunctionOps for Flex {
    fn apply_function(inputs: TensorList<Self>, function: SharedFunction) -> FloatTensor<Self> {
        forward::<Self>(inputs.0, &function).0
    }
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
impl FunctionOps for burn::backend::Cube {
    fn apply_function(inputs: TensorList<Self>, function: SharedFunction) -> FloatTensor<Self> {
        forward::<Self>(inputs.0, &function).0
    }
}

impl<B: Backend, C: CheckpointStrategy> FunctionOps for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn apply_function(inputs: TensorList<Self>, function: SharedFunction) -> FloatTensor<Self> {
        match inputs.0.len() {
            1 => record::<B, C, 1>(inputs.0, function),
            2 => record::<B, C, 2>(inputs.0, function),
            3 => record::<B, C, 3>(inputs.0, function),
            4 => record::<B, C, 4>(inputs.0, function),
            n => panic!("a function takes 1 to {MAX_INPUTS} inputs, {function:?} was given {n}"),
        }
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
        Err(_) => panic!("{function:?} returned a tensor of another backend than its inputs"),
    }
}

fn forward<B: Backend>(
    inputs: Vec<FloatTensor<B>>,
    function: &SharedFunction,
) -> (FloatTensor<B>, Vec<DispatchTensor>)
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let (output, saved) = function
        .0
        .forward(inputs.into_iter().map(wrap::<B>).collect());
    (unwrap::<B>(output, function), saved)
}

/// The recorded step of a function of `N` inputs.
#[derive(Debug)]
struct RecordedFunction;

impl<B: Backend, const N: usize> Backward<B, N> for RecordedFunction
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = (SharedFunction, Vec<DispatchTensor>);

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = gradients.consume::<B>(&ops.node);
        let (function, saved) = ops.state;
        let needed: Vec<bool> = ops.parents.iter().map(Option::is_some).collect();
        let gradient = wrap::<B>(gradient);
        let so_far = function.0.onto().and_then(|input| {
            // Only intermediate gradients are removed when consumed, as this step's own was; that
            // of a leaf would be added twice.
            let parent = ops.parents[input].as_ref();
            let parent = parent.filter(|parent| parent.requirement == ops.node.requirement)?;
            Some(wrap::<B>(gradients.consume::<B>(parent)))
        });
        let parents = match so_far {
            Some(so_far) => function.0.backward_onto(saved, gradient, &needed, so_far),
            None => function.0.backward(saved, gradient, &needed),
        };
        for (parent, gradient) in ops.parents.iter().zip(parents) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                gradients.register::<B>(parent.id, unwrap::<B>(gradient, &function));
            }
        }
    }
}

fn record<B: Backend, C: CheckpointStrategy, const N: usize>(
    inputs: Vec<FloatTensor<Autodiff<B, C>>>,
    function: SharedFunction,
) -> FloatTensor<Autodiff<B, C>>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let (primitives, guards): (Vec<_>, Vec<_>) =
        inputs.into_iter().map(|tensor| tensor.into_parts()).unzip();
    let Ok(guards) = <[_; N]>::try_from(guards) else {
        unreachable!("`record` is called with as many inputs as N says")
    };
    let step = <RecordedFunction as Backward<B, N>>::prepare::<C>(RecordedFunction, guards);
    match step.compute_bound().stateful() {
        OpsKind::Tracked(step) => {
            let (output, saved) = forward::<B>(primitives, &function);
            step.finish((function, saved), output)
        }
        OpsKind::UnTracked(step) => step.finish(forward::<B>(primitives, &function).0),
    }
}
