//! The weight of a linear layer.

use burn::module::Param;
use burn::tensor::Tensor;

use super::forward_context::{self, is_tracked};
use super::hook::{HookHandle, ParameterHook, Pass, anchored_value};

/// The weight of a linear layer, and the destination of its gradient.
#[derive(Clone, Debug)]
pub struct Weight {
    pub(super) tensor: Tensor<2>,
    pub(super) hooked: Option<HookedWeight>,
}

/// A weight with a [`ParameterHook`].
#[derive(Clone, Debug)]
pub(super) struct HookedWeight {
    pub handle: HookHandle,
    /// The tensor that the module holds.
    base: Tensor<2>,
    /// Whether the matmul passes the gradient to the hook. The autodiff graph then does not hold the value, which may
    /// be gathered again for the backward pass.
    pub(super) takes_gradient: bool,
    /// Whether the weight is frozen. The graph does not hold the value of a frozen weight either.
    pub(super) is_frozen: bool,
    /// Whether the module holds the weight as `[out, in]`.
    pub(super) transposed: bool,
}

impl HookedWeight {
    /// Returns the value `[in, out]`, as floats.
    pub fn value(&self, pass: Pass) -> Tensor<2> {
        let value = self.handle.value_in(self.base.clone(), pass).0;
        if self.transposed {
            value.transpose()
        } else {
            value
        }
    }

    /// Returns the hook that receives the gradient, or `None` if the autodiff graph receives it.
    pub fn taking(&self) -> Option<&HookHandle> {
        Some(&self.handle).filter(|_| self.takes_gradient)
    }
}

impl Weight {
    /// Returns the weight `[in, out]` of a layer with the input `x`.
    ///
    /// With a [`ParameterHook`] the matmul passes the gradient directly to the sink, so that the computation of the
    /// gradient can be deferred.
    pub fn of(param: &Param<Tensor<2>>, x: &Tensor<3>) -> Self {
        let hooked = match (ParameterHook::of(param), ParameterHook::of_frozen(param)) {
            (Some(hook), _) if is_tracked(x) => HookedWeight::taking_gradient(hook, param),
            (_, Some(hook)) if is_tracked(x) => HookedWeight::new(hook, param, true),
            _ => return anchored_value(param, x).into(),
        };
        Self {
            tensor: hooked.handle.value(hooked.base.clone()).0,
            hooked: Some(hooked),
        }
    }

    /// Returns the weight for a matmul that reads the value directly from the hook, which may hold the value only in
    /// FP8.
    pub(super) fn unfetched(param: &Param<Tensor<2>>, x: &Tensor<3>) -> Self {
        if let Some(hook) = ParameterHook::of_frozen(param) {
            hook.handle().note();
            let hooked = HookedWeight::new(hook, param, true);
            return Self {
                tensor: hooked.base.clone(),
                hooked: Some(hooked),
            };
        }
        let Some(hook) = ParameterHook::of(param) else {
            return anchored_value(param, x).into();
        };
        hook.handle().note();
        let hooked = if is_tracked(x) {
            HookedWeight::taking_gradient(hook, param)
        } else {
            HookedWeight::new(hook, param, false)
        };
        let tensor = match (hooked.takes_gradient, forward_context::anchor().is_some()) {
            (true, _) => hooked.base.clone(),
            // The gradient comes back through the graph.
            (false, true) => param.val(),
            (false, false) => {
                hooked.handle.expect_unrecorded();
                hooked.base.clone()
            }
        };
        Self {
            tensor,
            hooked: Some(hooked),
        }
    }

    /// Returns whether the weight has a gradient.
    pub(super) fn trains(&self) -> bool {
        match &self.hooked {
            // In a recording every tensor counts as tracked.
            Some(hooked) if hooked.is_frozen => false,
            hooked => {
                let takes_gradient = hooked.as_ref().is_some_and(|it| it.takes_gradient);
                takes_gradient || is_tracked(&self.tensor)
            }
        }
    }

    /// Returns the weight `[out, in]` as `[in, out]`. The module still holds it as `[out, in]`.
    pub fn transposed(self) -> Self {
        Self {
            tensor: self.tensor.transpose(),
            hooked: self.hooked.map(|hooked| HookedWeight {
                transposed: true,
                ..hooked
            }),
        }
    }

    /// Returns whether the hook takes the gradient as `[out, in]`.
    pub(super) fn is_transposed(&self) -> bool {
        self.hooked.as_ref().is_some_and(|hooked| hooked.transposed)
    }
}

impl HookedWeight {
    /// Creates a weight whose gradient the matmul passes to the hook, and announces this gradient.
    fn taking_gradient(hook: &ParameterHook, param: &Param<Tensor<2>>) -> Self {
        hook.handle().expect();
        Self {
            takes_gradient: true,
            ..Self::new(hook, param, false)
        }
    }

    /// Creates a weight whose gradient, if any, is computed by the autodiff graph.
    fn new(hook: &ParameterHook, param: &Param<Tensor<2>>, is_frozen: bool) -> Self {
        Self {
            handle: hook.handle().clone(),
            base: param.base(),
            takes_gradient: false,
            is_frozen,
            transposed: false,
        }
    }
}

impl From<Tensor<2>> for Weight {
    /// Creates a weight whose gradient stays in the graph.
    fn from(tensor: Tensor<2>) -> Self {
        Self {
            tensor,
            hooked: None,
        }
    }
}
